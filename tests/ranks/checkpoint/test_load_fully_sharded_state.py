"""Weights that are shared out resume as whole ones and the other way round."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.live_ranks import run_ranks
from tests.ranks.checkpoint import test_load_shared_state as shared


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "dtype"),
    [
        ((2, 3), (1, 0), "fp32"),
        ((1, 0), (2, 3), "fp32"),
        ((2, 3), (2, 3), "bf16"),
        ((2, 3), (2, 1), "bf16"),
        ((2, 2), (3, 3), "bf16"),
        ((3, 3), (2, 0), "fp16"),
    ],
)
def test_any_way_resumes_any_other(tmp_path: Path, saved_as, loaded_as, dtype: str, monkeypatch) -> None:
    monkeypatch.setattr(shared, "config_of", _of_twelve_samples)
    shared.test_any_way_resumes_any_other(tmp_path, saved_as, loaded_as, dtype)


def _of_twelve_samples(folder: Path, way: tuple[int, int], dtype: str, original=shared.config_of):
    """Two and three replicas divide them."""
    config = original(folder, way, dtype)
    return dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=12))


def test_initial_main_weights_are_drawn_in_fp32(tmp_path: Path) -> None:
    config = shared.config_of(tmp_path, (2, 3), "bf16")
    exact = shared.config_of(tmp_path, (1, 0), "fp32")
    mains = run_ranks(shared.initial, config.parallel.mesh, 2, config)[0]
    (weights,) = run_ranks(shared.initial, exact.parallel.mesh, 1, exact)
    names = [name.removeprefix("model.") for name in weights if name.startswith("model.")]
    assert names
    for name in names:
        assert torch.equal(mains[f"optimizer.{name}.main"], weights[f"model.{name}"])
        assert torch.equal(mains[f"model.{name}"], weights[f"model.{name}"].bfloat16())


def evaluate_and_load(topology, config) -> tuple[float, float, float]:
    """Validation losses of what is saved, of the weights an iteration later, and of what is loaded."""
    trainer = shared.trainer_of(topology, config)
    trainer.step()
    saved = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
    trainer.save()
    trainer.step()
    later = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
    assert trainer.load()
    return saved, later, trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]


def test_weights_that_an_evaluation_left_whole_are_not_used_again(tmp_path: Path) -> None:
    config = shared.config_of(tmp_path, (2, 3), "fp32")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, eval_iters=1))
    for saved, later, loaded in run_ranks(evaluate_and_load, config.parallel.mesh, 2, config):
        assert saved == loaded != later
