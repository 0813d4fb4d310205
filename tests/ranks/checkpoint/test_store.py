"""Checkpoints over ranks: every tensor back bitwise, and every rank of one mind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megalite.checkpoint.progress import Progress
from megalite.checkpoint.store import load_checkpoint, save_checkpoint
from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.errors import UserError
from megalite.local_ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=50, norm_epsilon=1e-6)
CONFIG = Config(model=MODEL, training=TrainingConfig(global_batch_size=8))
PROGRESS = Progress(10, 80)


def parallel(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_backend="gloo")


def tensors_of(topology) -> dict[str, torch.Tensor]:
    """Views of one flat tensor, as the optimizer's are, with values of this stage and slice."""
    seed = 10 * topology.pp.rank + topology.tp.rank
    flat = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    flat[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    return {
        "model.weight": flat[:12].view(3, 4),
        "optimizer.weight.exp_avg": flat[12:].view(4, 2),
        "optimizer.step.0": torch.tensor(float(seed)),
        f"model.stage_{topology.pp.rank}": flat.double(),
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def save(topology, folder: Path) -> Path:
    return save_checkpoint(folder, PROGRESS, tensors_of(topology), CONFIG, topology)


def load(topology, folder: Path, config: Config = CONFIG) -> str | Progress | None:
    """The progress, after a check of each tensor's bits; or what the user is told."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(topology).items()}
    try:
        with topology.agreed():
            progress = load_checkpoint(folder, tensors, config, topology)
    except UserError as error:
        return str(error)
    if progress is not None:
        assert bits(tensors) == bits(tensors_of(topology))
    return progress


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_every_bit_comes_back(tmp_path, tp, pp, dp):
    world_size = tp * pp * dp
    folder = tmp_path / "new" / "run"
    paths = run_ranks(save, parallel(tp, pp, dp), world_size, folder)
    assert paths == [folder / "iter_0000010"] * world_size
    files = {f"pp_{stage:02d}_tp_{rank:02d}.safetensors" for stage in range(pp) for rank in range(tp)}
    assert {file.name for file in paths[0].iterdir()} == files | {"run.json"}
    assert {file.name for file in folder.iterdir()} == {"iter_0000010", "latest"}
    assert run_ranks(load, parallel(tp, pp, dp), world_size, folder) == [PROGRESS] * world_size


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_the_number_of_replicas_is_free(tmp_path, saved, loaded):
    run_ranks(save, parallel(dp=saved), saved, tmp_path)
    assert run_ranks(load, parallel(dp=loaded), loaded, tmp_path) == [PROGRESS] * loaded


@pytest.mark.parametrize(("axis", "change"), [("tp", parallel(tp=2)), ("pp", parallel(pp=2))])
def test_another_layout_is_named(tmp_path, axis, change):
    run_ranks(save, parallel(), 1, tmp_path)
    for told in run_ranks(load, change, 2, tmp_path):
        assert f"is of another layout: {axis} 1 (now 2); run with what it was saved with" in told


def test_another_model_is_named_field_by_field(tmp_path):
    run_ranks(save, parallel(), 1, tmp_path)
    other = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, hidden_size=16, activation="relu"))
    (told,) = run_ranks(load, parallel(), 1, tmp_path, other)
    assert "is of another model: hidden_size 8 (now 16), activation gelu (now relu); run with" in told


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize("damage", [damage, Path.unlink])
def test_a_damaged_file_of_one_rank_is_told_by_all(tmp_path, damage):
    run_ranks(save, parallel(tp=2), 2, tmp_path)
    damage(tmp_path / "iter_0000010" / "pp_00_tp_01.safetensors")
    first, second = run_ranks(load, parallel(tp=2), 2, tmp_path, timeout=60.0)
    assert first == second
    assert first.startswith(f"checkpoint {tmp_path / 'iter_0000010'} cannot be read (")


def save_where_one_rank_cannot(topology, folder: Path) -> str:
    """The disk is full for the second rank: all ranks must be told, and none may wait."""

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    if topology.rank == 1:
        safetensors.torch.save_file = full_disk  # in this process alone
    try:
        save_checkpoint(folder, Progress(20, 160), tensors_of(topology), CONFIG, topology)
    except UserError as error:
        return str(error)
    return "saved"


def test_a_full_disk_of_one_rank_is_told_by_all_and_leaves_nothing(tmp_path):
    run_ranks(save, parallel(tp=2), 2, tmp_path)
    first, second = run_ranks(save_where_one_rank_cannot, parallel(tp=2), 2, tmp_path, timeout=60.0)
    assert first == second
    assert "iter_0000020 cannot be written ([Errno 28] No space left on device)" in first
    assert {file.name for file in tmp_path.iterdir()} == {"iter_0000010", "latest"}
    assert run_ranks(load, parallel(tp=2), 2, tmp_path) == [PROGRESS] * 2


def test_run_json_tells_what_it_is(tmp_path):
    run_ranks(save, parallel(tp=2), 2, tmp_path)
    description = json.loads((tmp_path / "iter_0000010" / "run.json").read_text())
    assert description["progress"] == {"iteration": 10, "consumed_samples": 80}
    assert description["layout"] == {"tp": 2, "pp": 1}
    assert description["model"] == dataclasses.asdict(MODEL)
