"""What a verification changes of the config, what it shows, and in which precision and how far it traces."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.config import Config, DataConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.axes import Slice
from megalite.frontends.command_line import parse
from megalite.observe.verify import verification
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.trace_run import Activation, RankTrace
from megalite.observe.verify.verification import (
    FP16_LOSS_SCALE,
    locate_difference,
    verify_layouts,
    with_constant_loss_scale,
)
from megalite.train.run_context import Providers
from megalite.utils.errors import UserError

CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], vocab_size=100, params_dtype="fp64"),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(micro_batch_size=2, train_iters=1),
)
ALONE, LAYOUT = (Layout.parse(name).apply(CONFIG, 8) for name in ("tp1", "tp2"))


class FakeRuns:
    """Traces runs of one tensor.

    Attributes:
        from_iteration: number of the iteration from which on the layout differs.
        traced: dtype, number of ranks and number of the iteration of each run.
    """

    def __init__(self, from_iteration: int, is_random: bool = False, refused_dtype: str = "") -> None:
        self.from_iteration = from_iteration
        self.is_random = is_random
        self.refused_dtype = refused_dtype
        self.traced: list[tuple[str, int, int]] = []

    def __call__(
        self, config: Config, world_size: int, iteration: int, seed: int, providers: Providers | None
    ) -> list[RankTrace]:
        assert not config.training.compile
        dtype = config.model.params_dtype
        self.traced.append((dtype, world_size, iteration))
        if dtype == self.refused_dtype:
            raise UserError(f"the model has no {dtype}")
        value = torch.ones(64, 2, 4, dtype=torch.float64)
        value += float(world_size > 1 and iteration >= self.from_iteration) + float(self.is_random * seed)
        entry = Activation(["output of layers.0"], 0, value, 0, "output of layers.0")
        sizes = {"dp": 1, "tp": world_size}
        return [
            RankTrace(
                *(0, {"dp": 0, "tp": 0}, sizes, [{"dp": 0, "tp": 0}], Slice(0, 1), ("dp",), range(0), 2, 0),
                *([0], [], [entry], [], []),
            )
        ]


def test_iterations_are_traced_until_one_differs() -> None:
    runs = FakeRuns(2)
    found = locate_difference(LAYOUT, ALONE, 2, 5, trace=runs)
    assert found.text.startswith("first difference: output of layers.0 (forward, iteration 2, samples 0-1)")
    assert [each[1:] for each in runs.traced] == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 2)]
    assert not found.is_same


def test_layouts_that_agree_have_no_difference() -> None:
    found = locate_difference(LAYOUT, ALONE, 2, 3, trace=FakeRuns(4))
    assert (found.difference, found.text) == (None, "no difference in 3 iterations in fp64")
    assert found.is_same


def test_a_model_with_random_numbers_of_its_own_is_named() -> None:
    found = locate_difference(LAYOUT, ALONE, 2, 3, trace=FakeRuns(1, is_random=True))
    assert found.difference is None
    assert "two runs of one rank differ in the output of layers.0" in found.text
    assert not found.is_same


def _in_bf16(config: Config) -> Config:
    training = replace(config.training, compile=True)
    return replace(config, model=replace(config.model, params_dtype="bf16"), training=training)


@pytest.mark.parametrize(
    ("runs", "dtypes", "text"),
    [
        (FakeRuns(1), ["fp64"], "this is in fp64"),
        (FakeRuns(1, refused_dtype="fp64"), ["fp64", "bf16"], "in fp64: the model has no fp64"),
        (FakeRuns(9), ["fp64", "bf16"], "no difference in 1 iterations in fp64; this is in bf16"),
    ],
)
def test_fp64_comes_first(runs: FakeRuns, dtypes: list[str], text: str) -> None:
    found = locate_difference(_in_bf16(LAYOUT), _in_bf16(ALONE), 2, 1, trace=runs)
    assert list(dict.fromkeys(dtype for dtype, _, _ in runs.traced)) == dtypes
    assert text in found.text


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [("fp16", None, FP16_LOSS_SCALE), ("fp16", 8.0, 8.0), ("bf16", None, None)],
)
def test_only_a_dynamic_loss_scale_is_replaced(
    dtype: str, given: float | None, expected: float | None
) -> None:
    config = Config()
    config = replace(
        config,
        model=replace(config.model, params_dtype=dtype),
        optimizer=replace(config.optimizer, loss_scale=given),
    )
    assert with_constant_loss_scale(config).optimizer.loss_scale == expected


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
def test_a_terminal_shows_which_run_comes_before_the_first_row(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def record(config: Config, *_: Any, **options: Any) -> SimpleNamespace:
        shown.append(sys.stderr.getvalue())  # type: ignore[attr-defined]
        if config.parallel.mesh.smallest_world > 1:
            raise UserError("a model without cuts")
        return SimpleNamespace(routing=None)

    monkeypatch.setattr(verification, "record_run", record)
    monkeypatch.setattr(sys, "stderr", stream())
    config, _ = parse(["--preset", "llama-tiny", "--vocab-size", "256", "--mock-data", "--train-iters", "1"])
    with pytest.raises(UserError, match="without cuts"):
        verify_layouts(config, [Layout.parse("tp2"), Layout.parse("pp2")], 1)
    last = [text.rpartition("\r")[2].removesuffix("\033[K") for text in shown]
    assert last == (
        ["run 1 of 3: one rank", "run 2 of 3: tp2", "run 3 of 3: pp2"] if stream is _Terminal else [""] * 3
    )
    assert sys.stderr.getvalue().endswith("\r\033[K" if stream is _Terminal else "")  # type: ignore[attr-defined]
