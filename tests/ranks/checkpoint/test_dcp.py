"""torch.distributed.checkpoint reads our checkpoints into DTensors of any placement."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megalite.config import ParallelConfig
from tests.checkpoint_folder import FULL, SHORT, STEPS, cut_pieces, write_checkpoint
from tests.live_ranks import run_ranks


def load(topology, folder: Path) -> bool:
    """Into every placement on a mesh of the ranks by 2, and into plain tensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from megalite.checkpoint.dcp import MegaliteReader

    mesh = init_device_mesh("cpu", (topology.world_size // 2, 2))
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    for outer in (whole, rows, columns):
        for inner in (whole, rows, columns):
            state = {
                "cut": distribute_tensor(torch.zeros_like(FULL), mesh, [outer, inner]),
                "padded": distribute_tensor(
                    torch.zeros_like(SHORT), mesh, [whole, rows if rows in (outer, inner) else whole]
                ),
                "steps": torch.zeros(()),
            }
            dcp.load(state, storage_reader=MegaliteReader(folder))
            assert torch.equal(state["cut"].full_tensor(), FULL)
            assert torch.equal(state["padded"].full_tensor(), SHORT)
            assert torch.equal(state["steps"], STEPS)
    return True


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_placement_is_read(tmp_path: Path, world_size: int) -> None:
    folder = write_checkpoint(tmp_path)
    parallel = ParallelConfig(data_parallel_size=world_size)
    assert run_ranks(load, parallel.mesh, world_size, folder) == [True] * world_size


def load_alone(folder: Path, name: str = "cut", like: torch.Tensor = FULL) -> torch.Tensor:
    import torch.distributed.checkpoint as dcp

    from megalite.checkpoint.dcp import MegaliteReader

    state = {name: torch.zeros_like(like)}
    dcp.load(state, storage_reader=MegaliteReader(folder), no_dist=True)
    return state[name]


def test_one_process_reads_it_without_a_pickle(tmp_path: Path, monkeypatch) -> None:
    folder = write_checkpoint(tmp_path)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    monkeypatch.setattr(torch, "load", None)
    assert torch.equal(load_alone(folder), FULL)


def test_files_that_are_not_needed_are_not_opened(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    os.truncate(folder / "part_1.safetensors", 60)
    assert torch.equal(load_alone(folder, "padded", SHORT), SHORT)


@pytest.mark.parametrize("damage", [lambda file: os.truncate(file, 60), Path.unlink])
def test_a_damaged_file_is_reported(tmp_path: Path, damage) -> None:
    folder = write_checkpoint(tmp_path)
    damage(folder / "part_1.safetensors")
    with pytest.raises(CheckpointException, match=r"part_1.safetensors (is missing|has other contents)"):
        load_alone(folder)


def test_lost_elements_are_reported(tmp_path: Path) -> None:
    """torch itself leaves what no chunk has as it was."""
    files = cut_pieces()
    del files[2]["cut"]
    # torch 2.11 leaves out why the metadata cannot be read
    with pytest.raises(CheckpointException, match=r"4 elements of cut are in no file|metadata is None"):
        load_alone(write_checkpoint(tmp_path, files=files))


def test_another_shape_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"[Ss]ize mismatch"):
        load_alone(write_checkpoint(tmp_path), "cut", torch.zeros(6, 4))
