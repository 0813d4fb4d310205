"""The check of saves in the background, over gloo ranks, and that it finds a save which is not protected."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.gpu_check.saves import CASES, NUM_STEPS, SMALL_MODEL, Case, Compared, compare_saves, config_of
from megalite.checkpoint.saver import HostCopy
from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.train.trainer import StepResult, Trainer
from tests.live_ranks import run_ranks


def compare_with_slow_copies(topology: Topology, config: Config, is_protected: bool) -> Compared:
    """The copy takes longer than the next gradients; without protection the update does not wait for it."""
    fill, protect, step = HostCopy.fill, HostCopy.protect, Trainer.step
    is_updated = threading.Event()

    def fill_late(copy: HostCopy) -> None:
        is_updated.wait(0.3 if is_protected else 300.0)
        fill(copy)

    def step_and_tell(trainer: Trainer) -> StepResult:
        result = step(trainer)
        if trainer.progress.iteration > NUM_STEPS:
            is_updated.set()
        return result

    with (
        mock.patch.object(HostCopy, "fill", fill_late),
        mock.patch.object(HostCopy, "protect", protect if is_protected else lambda copy: None),
        mock.patch.object(Trainer, "step", step_and_tell),
    ):
        return compare_saves(topology, config)


def compared(case: Case, folder: Path, is_protected: bool = True) -> Compared:
    (folder / "at_once").mkdir()
    config = config_of(case, SMALL_MODEL, folder, "gloo")
    first, second = run_ranks(compare_with_slow_copies, config.parallel.mesh, 2, config, is_protected)
    assert first == second
    return first


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_save_in_the_background_equals_one_that_blocks(case: Case, tmp_path: Path) -> None:
    found = compared(case, tmp_path)
    assert found.unequal == [] and found.has_changed and found.num_files >= 4


@pytest.mark.parametrize("zero_stage", range(4))
def test_an_unprotected_save_is_found(zero_stage: int, tmp_path: Path) -> None:
    found = compared(Case(zero_stage, "fp32"), tmp_path, is_protected=False)
    assert any(name.endswith(".safetensors") for name in found.unequal)
