"""Which configs can be compared, and in which precision and how far they are traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import Config, DataConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.axes import Slice
from megalite.train.run_context import Providers
from megalite.utils.errors import UserError
from megalite.verify.bisect import locate_difference
from megalite.verify.layouts import Layout
from megalite.verify.trace_run import Activation, RankTrace

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
    ("other", "named"),
    [
        (replace(ALONE, training=replace(ALONE.training, seed=7)), "--seed is 1234 and 7"),
        (replace(ALONE, data=replace(ALONE.data, data_path=("other",))), "--data-path is .* and .*other"),
        (replace(ALONE, model=replace(ALONE.model, num_layers=2)), "--num-layers is 4 and 2"),
    ],
)
def test_runs_that_are_not_the_same_are_refused(other: Config, named: str) -> None:
    with pytest.raises(UserError, match=f"the two layouts cannot be compared: .*{named}"):
        locate_difference(LAYOUT, other, 2, 1, trace=FakeRuns(9))
