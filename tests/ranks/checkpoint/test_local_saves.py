"""Non-persistent saves: loaded if every rank has its own, whole and newer, and else skipped."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.saver import Saver
from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import (
    config_of,
    contents_of,
    full_disk,
    loaded,
    parallel,
    state,
    writer,
)


def local_config(folder: Path, **fields) -> Config:
    return config_of(
        folder / "save",
        non_persistent_save_interval=1,
        non_persistent_local_ckpt_dir=str(folder / "local"),
        **fields,
    )


def save(topology, config: Config) -> None:
    """A persistent save of iteration 10, others of 11 and 12, and one of 13 that rank 1 fails."""
    with Saver(config.checkpoint, topology).training_from(0) as saver:
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        for iteration, value in ((11, 1.5), (12, 2.0)):
            saver.finish()
            saver.save_local(contents_of(config, topology, iteration), state(topology, value))
            saver.finish()
            assert list(iterations_in(saver.local.folder)) == [iteration]
        with writer(full_disk) if topology.rank == 1 else nullcontext():
            saver.save_local(contents_of(config, topology, 13), state(topology, 3.0))
            saver.finish()
        assert list(iterations_in(saver.local.folder)) == [12]


def load(topology, config: Config) -> tuple[int, float] | None:
    saver = Saver(config.checkpoint, topology)
    found = loaded(topology, config, saver)
    with saver.training_from(found[0] if found else 0):
        assert list(iterations_in(saver.local.folder)) == ([12] if found and found[0] == 12 else [])
    return found


def rank_folder(folder: Path, rank: int) -> Path:
    (run,) = (folder / "local").iterdir()
    return run / f"rank_{rank:05d}" / "iter_0000012"


def flip(folder: Path) -> None:
    file = rank_folder(folder, 1) / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def as_copied(folder: Path) -> None:
    """The folder is a copy of the one that the run saved to, as of another run that continues from it."""
    (folder / "save").rename(folder / "original")
    shutil.copytree(folder / "original", folder / "save")


def as_moved(folder: Path) -> None:
    (folder / "save").rename(folder / "elsewhere")
    (folder / "elsewhere").rename(folder / "save")


CHANGES = {
    "nothing": (lambda folder: None, (12, "same")),
    "a bit": (flip, (10, "same")),
    "a lost node": (lambda folder: rank_folder(folder, 1).rename(folder / "elsewhere"), (10, "same")),
    "cut short": (lambda folder: os.truncate(rank_folder(folder, 0) / "run.json", 30), (10, "same")),
    "another run": (lambda folder: (folder / "save" / "run_id").unlink(), (10, "same")),
    "a copied run": (as_copied, (10, "same")),
    "a moved run": (as_moved, (12, "same")),
    "more ranks": (lambda folder: None, (10, parallel(dp=4))),
    "another layout": (lambda folder: None, (10, parallel(tp=2))),
}


@pytest.mark.parametrize(("kind", "is_async"), [*((kind, False) for kind in CHANGES), ("nothing", True)])
def test_the_newest_that_every_rank_has_whole_is_loaded(tmp_path: Path, kind: str, is_async: bool) -> None:
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path, async_save=is_async)
    change, (iteration, layout) = CHANGES[kind]
    here = parallel(dp=2)
    run_ranks(save, here.mesh, 2, config)
    change(tmp_path)
    there = here if layout == "same" else layout
    assert isinstance(there, ParallelConfig)
    world_size = there.tensor_model_parallel_size * (there.data_parallel_size or 1)
    found = run_ranks(load, there.mesh, world_size, config)
    assert found == [(iteration, {10: 1.0, 12: 2.0}[iteration])] * world_size


def supersede(topology, config: Config) -> list[list[int]]:
    """What a rank has after a persistent save that is not the last, and after one that is."""
    saver = Saver(config.checkpoint, topology)
    assert saver.local is not None
    seen = []
    for iteration, is_last in ((20, False), (40, True)):
        saver.save_local(contents_of(config, topology, iteration - 1), state(topology, 1.0))
        saver.save(contents_of(config, topology, iteration), state(topology, 2.0), is_last=is_last)
        saver.finish()
        seen.append(list(iterations_in(saver.local.folder)))
    return seen


def test_a_persistent_save_makes_them_superfluous(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path, async_save=True)
    assert run_ranks(supersede, parallel(dp=2).mesh, 2, config) == [[[], []]] * 2
    assert not list((tmp_path / "local").iterdir())


def load_older(topology, config: Config) -> tuple[int, float] | None:
    saver = Saver(config.checkpoint, topology)
    saver.save_local(contents_of(config, topology, 10), state(topology, 1.0))
    saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    saver.save_local(contents_of(config, topology, 15), state(topology, 1.5))
    return loaded(topology, config, saver)


def test_a_newer_persistent_one_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    assert run_ranks(load_older, parallel().mesh, 1, local_config(tmp_path)) == [(20, 2.0)]


def run_config(folder: Path, way: tuple[int, int, int, str], is_async: bool) -> Config:
    pp, dp, stage, dtype = way
    model = dataclasses.replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=100, seq_length=16)
    return dataclasses.replace(
        local_config(folder, async_save=is_async),
        model=dataclasses.replace(model, params_dtype=dtype),
        parallel=ParallelConfig(1, pp, dp, zero_stage=stage, overlap_param_gather=stage in (1, 2)),
        optimizer=OptimizerConfig(initial_loss_scale=2.0**20, hysteresis=1, lr=1e-2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=9, eval_iters=0),
    )


def train(topology, config: Config, resumes: bool) -> tuple[int, list[float]]:
    """Three iterations and a save, or what it saved; then the losses of three more."""
    with start_trainer(config, topology) as trainer:
        if resumes:
            assert trainer.load()
        first = trainer.progress.iteration
        with trainer.saver.training_from(first):
            if not resumes:
                for _ in range(3):
                    trainer.step()
                trainer.save_local()
            losses = [trainer.step().loss for _ in range(3)]
            trainer.saver.finish()
        return first, losses


@pytest.mark.parametrize(
    "way",
    [
        (1, 2, 0, "fp32"),
        (2, 1, 0, "fp16"),
        pytest.param((1, 2, 1, "bf16"), marks=pytest.mark.slow),
        pytest.param((1, 2, 2, "fp16"), marks=pytest.mark.slow),
        pytest.param((1, 2, 3, "bf16"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_bitwise(tmp_path: Path, way: tuple[int, int, int, str]) -> None:
    """With the loss scale at its start, the word table on two stages, and parts of what ZeRO shares out."""
    (tmp_path / "save").mkdir()
    config = run_config(tmp_path, way, is_async=True)
    undisturbed = run_ranks(train, config.parallel.mesh, 2, config, False)
    resumed = run_ranks(train, config.parallel.mesh, 2, config, True)
    assert [first for first, _ in resumed] == [3, 3]
    assert [losses for _, losses in resumed] == [losses for _, losses in undisturbed]
