"""Each element is written once a stage, and what replicas hold alike is spread evenly over them."""

from __future__ import annotations

import pytest
import torch

from megalite.checkpoint.save import plan_save
from megalite.checkpoint.tensor_files import FilePiece
from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.tensor_parallel.placement import Cut

SIZES = (40_000, 1000, 1000, 999, 500, 64, 64, 64, 7, 1)
CUT_BYTES = 4000


def shards(topology: Topology) -> dict[str, ParameterShard]:
    """Two tensors that ranks of a group have shards of, which every group has."""
    found = {}
    for name, size in (("large", 20_000), ("small", 30)):
        start = size * topology.dp.shard.rank
        elements = torch.arange(float(start), start + size)
        full = (size * topology.dp.shard.size,)
        found[name] = ParameterShard(elements, start, full, ParameterSpec(full), is_replicated=False)
    return found


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_groups_write_a_share_of_their_shards_each(degree: int) -> None:
    parallel = ParallelConfig(1, 1, 8, zero_stage=1, data_parallel_shard_degree=degree)
    written: dict[str, list[float]] = {"large": [], "small": []}
    for rank in range(8):
        with Topology.fake(parallel.mesh, 8, rank, "cpu") as topology:
            plan = plan_save(shards(topology), topology, CUT_BYTES)
        for name, piece in plan.items():
            assert piece.range is not None
            assert piece.tensor.tolist() == list(range(piece.range.start, piece.range.end))
            written[name] += piece.tensor.tolist()
        assert plan["large"].tensor.numel() == 20_000 * degree // 8
    assert sorted(written["large"]) == list(range(20_000 * degree))
    assert sorted(written["small"]) == list(range(30 * degree))


def tensors(topology: Topology) -> dict[str, ParameterShard | torch.Tensor]:
    """Copies of tensors, each second one cut over tp, with the index of each element for its value."""
    state: dict[str, ParameterShard | torch.Tensor] = {"count": torch.tensor(1.0), "none": torch.zeros(0)}
    for number, size in enumerate(SIZES):
        shard = Cut("tp", 0) if number % 2 else None
        full = (size * topology.tp.size if shard else size,)
        state[f"copied.{number}"] = ParameterShard(
            torch.arange(float(size)), 0, (size,), ParameterSpec(full, shard), is_replicated=True
        )
    start = 10 * topology.dp.rank
    own = ParameterShard(
        torch.arange(start, start + 10.0), start, (40,), ParameterSpec((40,)), is_replicated=False
    )
    return state | {"own": own}


def shares(tp: int, dp: int) -> dict[tuple[int, int], dict[str, FilePiece]]:
    """What each rank writes, by its place on tp and dp."""
    found = {}
    for rank in range(tp * dp):
        parallel = ParallelConfig(tp, 1, dp, distributed_backend="gloo")
        with Topology.fake(parallel.mesh, tp * dp, rank, "cpu") as topology:
            share = plan_save(tensors(topology), topology, CUT_BYTES)
            found[topology.tp.rank, topology.dp.rank] = share
    return found


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (2, 1), (1, 4), (2, 4)])
def test_each_element_is_written_once(tp: int, dp: int) -> None:
    by_rank = shares(tp, dp)
    for number, size in enumerate(SIZES):
        writers = range(tp) if number % 2 else (0,)
        for tp_rank in range(tp):
            pieces = [by_rank[tp_rank, rank].get(f"copied.{number}") for rank in range(dp)]
            elements = [value for piece in pieces if piece for value in piece.tensor.flatten().tolist()]
            expected = list(range(size)) if tp_rank in writers else []
            assert sorted(elements) == expected
            for piece in filter(None, pieces):
                assert piece.range is not None
                assert piece.range.end - piece.range.start == piece.tensor.numel()
                assert piece.tensor.flatten()[0] == piece.range.start
    assert sum("count" in share for share in by_rank.values()) == 1
    assert sum("own" in share for share in by_rank.values()) == dp
    assert not any("none" in share for share in by_rank.values())


@pytest.mark.parametrize("dp", [2, 3, 4, 8])
def test_replicas_write_about_the_same(dp: int) -> None:
    loads = [
        sum(piece.num_bytes for name, piece in share.items() if name.startswith("copied"))
        for share in shares(1, dp).values()
    ]
    assert sum(loads) == 4 * sum(SIZES)
    assert max(loads) - min(loads) <= CUT_BYTES
