"""Checkpoints over ranks: every tensor back bitwise, and every rank of one mind."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.tensor_parallel.placement import Cut
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import save_checkpoint

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=50, norm_epsilon=1e-6)
CONFIG = Config(model=MODEL, training=TrainingConfig(global_batch_size=8, train_iters=20))
PROGRESS = TrainingProgress(10, 80)
CUT = ParameterSpec((4 << 20,), Cut("tp", 0))
TEXTS = {"run.json", "config.yaml", "index.json", "SHA256SUMS"}


def parallel(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_backend="gloo")


def tensors_of(topology) -> dict[str, torch.Tensor | ParameterShard]:
    """Views of one flat tensor, as the optimizer's are, with values of this stage and slice."""
    flat = torch.randn(20, generator=torch.Generator().manual_seed(10 * topology.pp.rank + topology.tp.rank))
    flat[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    stage, tp = topology.pp.rank, topology.tp.size
    cut = {"spec": ParameterSpec((3, 4 * tp), Cut("tp", 1)), "is_replicated": True}
    return {
        f"model.{stage}.weight": ParameterShard(flat[:12], 0, (3, 4), **cut),
        f"optimizer.{stage}.exp_avg": ParameterShard(flat[8:].double(), 0, (3, 4), **cut),
        "optimizer.num_steps": torch.tensor(3.0),
    }


def elements(tensor: torch.Tensor | ParameterShard) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, ParameterShard) else tensor


def zeroed(tensor: torch.Tensor | ParameterShard) -> torch.Tensor | ParameterShard:
    zeros = torch.zeros_like(elements(tensor))
    return dataclasses.replace(tensor, tensor=zeros) if isinstance(tensor, ParameterShard) else zeros


def bits(tensors: dict[str, torch.Tensor | ParameterShard]) -> dict[str, bytes]:
    return {name: elements(tensor).numpy().tobytes() for name, tensor in tensors.items()}


def save(topology, folder: Path) -> Path:
    return save_checkpoint(folder, PROGRESS, tensors_of(topology), CONFIG, topology)


def load(topology, folder: Path, config: Config = CONFIG) -> str | TrainingProgress | None:
    """The progress, after a check of each tensor's bits; or the user's error message."""
    tensors = {name: zeroed(tensor) for name, tensor in tensors_of(topology).items()}
    try:
        plan = load_checkpoint(folder, tensors, config, topology)
    except UserError as error:
        return str(error)
    if plan is None:
        return None
    assert bits(tensors) == bits(tensors_of(topology))
    return plan.progress


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_every_bit_comes_back(tmp_path, tp, pp, dp):
    world_size = tp * pp * dp
    folder = tmp_path / "new" / "run"
    paths = run_ranks(save, parallel(tp, pp, dp).mesh, world_size, folder)
    assert paths == [folder / "iter_0000010"] * world_size
    replicas = [""] if dp == 1 else [f"_dp_{replica:03d}" for replica in range(dp)]
    files = {
        f"pp_{stage:02d}_tp_{rank:02d}{replica}.safetensors"
        for stage in range(pp)
        for rank in range(tp)
        for replica in replicas
    }
    assert {file.name for file in paths[0].iterdir()} == files | TEXTS
    assert {file.name for file in folder.iterdir()} == {"iter_0000010", "latest"}
    assert run_ranks(load, parallel(tp, pp, dp).mesh, world_size, folder) == [PROGRESS] * world_size


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_the_number_of_replicas_is_free(tmp_path, saved, loaded):
    run_ranks(save, parallel(dp=saved).mesh, saved, tmp_path)
    assert run_ranks(load, parallel(dp=loaded).mesh, loaded, tmp_path) == [PROGRESS] * loaded


def test_another_model_is_named_field_by_field(tmp_path):
    run_ranks(save, parallel().mesh, 1, tmp_path)
    other = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, hidden_size=16, activation="relu"))
    (message,) = run_ranks(load, parallel().mesh, 1, tmp_path, other)
    assert "has another model: hidden_size 8 (now 16), " in message
    assert "activation gelu (now relu); use the checkpoint's values" in message


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "what"),
    [(damage, "has other contents than SHA256SUMS says"), (Path.unlink, "is missing")],
)
def test_a_damaged_file_of_one_rank_is_reported_by_all(tmp_path, damage, what):
    run_ranks(save, parallel(tp=2).mesh, 2, tmp_path)
    damage(tmp_path / "iter_0000010" / "pp_00_tp_01.safetensors")
    first, second = run_ranks(load, parallel(tp=2).mesh, 2, tmp_path)
    assert first == second
    assert f"(iter_0000010: pp_00_tp_01.safetensors {what})" in first


def save_where_one_rank_cannot(topology, folder: Path) -> str:
    """The second rank cannot write large files: all ranks must report it, and none may wait."""
    large = {
        f"{topology.tp.rank}": ParameterShard(torch.zeros(2 << 20), 0, (2 << 20,), CUT, is_replicated=True)
    }
    if topology.rank == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # of this process alone
    try:
        save_checkpoint(folder, TrainingProgress(20, 160), large, CONFIG, topology)
    except UserError as error:
        return str(error)
    return "saved"


def test_a_full_disk_of_one_rank_is_reported_by_all_and_leaves_nothing(tmp_path):
    run_ranks(save, parallel(tp=2).mesh, 2, tmp_path)
    first, second = run_ranks(save_where_one_rank_cannot, parallel(tp=2).mesh, 2, tmp_path)
    assert first == second
    assert "iter_0000020 cannot be written (rank 1: File too large): free space or change --save" in first
    assert {file.name for file in tmp_path.iterdir()} == {"iter_0000010", "latest"}
    assert run_ranks(load, parallel(tp=2).mesh, 2, tmp_path) == [PROGRESS] * 2


def test_run_json_tells_what_it_is(tmp_path):
    run_ranks(save, parallel(tp=2).mesh, 2, tmp_path)
    description = json.loads((tmp_path / "iter_0000010" / "run.json").read_text())
    assert 0 < description["written"]["start_time"] <= description["written"]["end_time"] <= time.time()
    assert TrainingProgress.from_record(description["progress"]) == PROGRESS
    assert description["layout"] == {"pp": 1, "dp": 1, "tp": 2}
    assert description["model"] == dataclasses.asdict(MODEL)
