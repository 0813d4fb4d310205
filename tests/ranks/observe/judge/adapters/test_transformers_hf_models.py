"""Judgements of transformers and DeepSpeed: right as they are, and with an error in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import LocalRanks
from megalite.observe.judge.judge import ProgramJudge, Verdict
from megalite.observe.judge.rank_record import Task, import_adapter
from megalite.observe.verify.layouts import Layout

pytestmark = pytest.mark.slow
WRONG = str(Path(__file__).parents[1] / "wrong_package.py")
CONFIG = with_fields(
    Config(model=PRESETS["llama-tiny"]),
    **{"num_layers": 1, "vocab_size": 32, "hidden_size": 32, "kv_channels": 8, "qk_layernorm": True},
    **{
        "seq_length": 8,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "mock_data": True,
        "lr_decay_style": "constant",
        "train_iters": 2,
    },
)


def _judged(program: str, layouts: str, folder: Path | None = None, **options: str) -> Verdict:
    samples = torch.randint(32, (1 + (folder is not None), 4, 9), generator=torch.Generator().manual_seed(0))
    with LocalRanks() as ranks:
        task = Task(program, Layout(), CONFIG, options, samples)
        judge = ProgramJudge(import_adapter(program), task, ranks, folder)
        return judge.run([Layout.parse(name) for name in layouts.split(",")])


def test_transformers_trains_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    verdict = _judged("transformers", "dp2,tp2mbs4,dp2+zero3", tmp_path)
    assert not verdict.different
    assert {"tp2mbs4", "dp2", "dp2+zero3", "one rank -> dp2"} <= set(verdict.same)


def test_transformers_sums_some_gradients_again_with_each_microbatch() -> None:
    """This is an error of transformers 5.23. If this fails because it is mended, remove it."""
    pytest.importorskip("transformers")
    assert "q_norm" in "\n".join(_judged("transformers", "tp2").different["tp2"])


def test_a_partial_gradient_in_transformers_is_found() -> None:
    pytest.importorskip("transformers")
    found = "\n".join(_judged(WRONG, "tp2mbs4", error="partial_norms").different["tp2mbs4"])
    assert "q_norm.weight, model.layers.0.self_attn.k_norm.weight is 0.5 (1/tp)" in found


def test_deepspeed_trains_the_same_run() -> None:
    pytest.importorskip("deepspeed")
    verdict = _judged("deepspeed", "dp2+zero1,dp2+zero3,dp2,cp2+zero3")
    assert not verdict.different and not verdict.refused


def test_deepspeed_multiplies_the_gradients_of_ulysses() -> None:
    """This is an error of DeepSpeed 0.19.8. If this fails because it is mended, remove it."""
    pytest.importorskip("deepspeed")
    found = "\n".join(_judged("deepspeed", "cp2+zero1").different["cp2+zero1"])
    assert "is 2 (cp" in found and "the gradient norm of iteration 1" in found


def test_gradients_that_deepspeed_does_not_average_are_found() -> None:
    pytest.importorskip("deepspeed")
    found = "\n".join(_judged(WRONG, "dp2+zero1", error="not_averaged").different["dp2+zero1"])
    assert "is 2 (dp" in found
