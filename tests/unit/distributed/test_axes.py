"""The table of axes: coordinates, sizes, several axes as one, and a second mesh of the same ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.distributed.axes import AXES, MODEL, AxisEntry, MeshOptions, MeshSpec, Slice
from megalite.distributed.axis import HeldPositions
from megalite.distributed.topology import Topology
from megalite.observe.operator_log import CollectiveCall, Traffic
from megalite.utils.errors import UserError
from tests.trial_axis import INNERMOST, OUTERMOST, OUTSIDE_TP, with_trial

PP, DP, CP, TP = MODEL.axes
WITH_CP = MODEL
EXPERTS = MeshSpec(
    "experts",
    (
        PP,
        AxisEntry("edp", "replicas of experts", "", frozenset({"replicas"}), takes_rest=True),
        AxisEntry("ep", "expert-parallel", "ep", frozenset({"weights"})),
        AxisEntry("etp", "tensor-parallel in experts", "etp", frozenset({"weights"})),
    ),
    groups=(("edp", "ep"),),
)


def options(table: tuple[MeshSpec, ...] = AXES, **sizes: int) -> MeshOptions:
    return MeshOptions(sizes, table)


def test_the_config_gives_each_axis_its_size() -> None:
    parallel = ParallelConfig(2, 3, 4, zero_stage=1, distributed_timeout_minutes=7)
    assert parallel.mesh == MeshOptions(
        {"pp": 3, "dp": 4, "cp": 1, "tp": 2}, zero_stage=1, timeout_minutes=7, backend="auto"
    )
    assert parallel.mesh.smallest_world == 24
    assert parallel.with_sizes({"dp": 2}) == replace(
        parallel, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=2
    )


def test_an_axis_without_a_size_takes_the_rest_or_has_one_rank() -> None:
    assert options((WITH_CP,), tp=2).sizes_in(12) == {"pp": 1, "dp": 6, "cp": 1, "tp": 2}
    assert options((WITH_CP,), tp=2, cp=3).sizes_in(12) == {"pp": 1, "dp": 2, "cp": 3, "tp": 2}
    message = (
        r"world size 12 is not tp 2 x pp 1 x dp 1 x cp 8 = 16: start 16 ranks .* --tp, --pp, --dp or --cp"
    )
    with pytest.raises(UserError, match=message):
        options((WITH_CP,), tp=2, cp=8).sizes_in(12)


@pytest.mark.parametrize("table", [(MODEL,), (WITH_CP,), (INNERMOST,), (OUTSIDE_TP,), (OUTERMOST,)])
def test_every_rank_has_coordinates_of_its_own(table: tuple[MeshSpec, ...]) -> None:
    names = table[0].names
    size = 2 ** len(names)
    expected = [
        dict(zip(names, place, strict=True)) for place in itertools.product(range(2), repeat=len(names))
    ]
    found = []
    for rank in range(size):
        with Topology.fake(options(table, **dict.fromkeys(names, 2)), size, rank) as topology:
            found.append(topology.coordinates)
            assert list(topology.axes) == list(names)
            assert all(axis.ranks[axis.rank] == rank for axis in topology.groups())
    assert found == expected


def test_ranks_hold_slices_of_a_sample_in_the_order_of_their_coordinates() -> None:
    mesh = options((WITH_CP,), tp=2, cp=3, dp=2)
    assert (mesh.num_position_slices, options(tp=2).num_position_slices) == (3, 1)
    for rank in range(12):
        with Topology.fake(mesh, 12, rank) as topology:
            assert topology.positions == HeldPositions(rank // 2 % 3, 3)
            assert topology.model.slice_along("tp", "cp") == Slice(rank % 6, 6)
            assert topology.model.slice_along() == Slice(0, 1)


def test_roles_are_one_axis_until_others_have_them_too() -> None:
    with Topology.fake(options(tp=2, pp=2, dp=2), 8, 3) as topology:
        assert topology.sample_ranks is topology.loss_ranks is topology.replicas is topology.dp
        assert [axis.name for axis in topology.groups()] == ["pp", "dp", "cp", "tp", "world"]
        assert topology.coordinates == {"pp": 0, "dp": 1, "tp": 1}
    with Topology.fake(options((WITH_CP,), tp=2, dp=3), 6, 3) as topology:
        assert topology.loss_ranks is topology.replicas is topology.dp


@pytest.mark.parametrize("rank", [0, 11, 22, 47])
def test_several_axes_become_one(rank: int) -> None:
    with Topology.fake(options((WITH_CP,), tp=2, cp=3, dp=4, pp=2), 48, rank) as topology:
        pp, dp, cp, tp = topology.coordinates.values()
        assert topology.sample_ranks is topology.dp
        replicas = topology.replicas
        assert (replicas.name, replicas.size, replicas.spans) == ("dp_cp", 12, ("dp", "cp"))
        assert topology.loss_ranks is replicas is topology.over("cp", "dp")
        assert replicas.rank == dp * 3 + cp
        assert replicas.ranks == tuple(((pp * 4 + i) * 3 + j) * 2 + tp for i in range(4) for j in range(3))
        assert dist.get_process_group_ranks(replicas.group) == list(replicas.ranks)
        assert topology.over("pp") is topology.pp
        assert topology.over("tp", "cp").ranks == tuple(range(rank - rank % 6, rank - rank % 6 + 6))
        with pytest.raises(KeyError, match="declare it in the table"):
            topology.over("tp", "dp")
        with pytest.raises(KeyError, match="axes of model"):
            topology.over("tp", "ep")
        assert topology.is_first_outside(topology.pp, replicas) == (tp == 0)
        assert topology.is_first_outside(topology.tp, topology.dp) == (pp == cp == 0)


@pytest.mark.parametrize("rank", [0, 7, 23])
def test_zero_shards_over_the_replicas_of_two_axes(rank: int) -> None:
    """A group of four replicas has ranks of two neighbours along the outer axis."""
    mesh = replace(options((WITH_CP,), tp=2, cp=2, dp=6), shard_degree=4)
    with Topology.fake(mesh, 24, rank) as topology:
        replicas = topology.replicas
        start = replicas.rank // 4 * 4
        assert replicas.shard.ranks == replicas.ranks[start : start + 4]
        assert replicas.replicate is not None
        assert replicas.replicate.ranks == replicas.ranks[replicas.rank % 4 :: 4]
        assert [part.name for part in replicas.parts] == ["dp_cp", "dp_cp_replicate", "dp_cp_shard"]
        assert all(each.observers is topology.observers for each in (*topology.groups(), *replicas.parts))


@pytest.mark.parametrize("rank", [0, 9, 23])
def test_a_second_factoring_of_the_same_ranks(rank: int) -> None:
    """Attention is cut over tp, and experts over etp and ep; the pipeline is the same."""
    with Topology.fake(options((WITH_CP, EXPERTS), tp=2, cp=2, pp=2, ep=3, etp=1), 24, rank) as topology:
        experts = topology.meshes["experts"]
        assert list(experts.coordinates) == ["pp", "edp", "ep"]  # a single rank is not named
        sizes = {name: axis.size for name, axis in experts.axes.items()}
        assert sizes == {"pp": 2, "edp": 4, "ep": 3, "etp": 1}
        assert experts.axes["pp"] is topology.pp
        assert experts.coordinates == {"pp": rank // 12, "edp": rank % 12 // 3, "ep": rank % 3}
        assert experts.axes["ep"].ranks == tuple(range(rank - rank % 3, rank - rank % 3 + 3))
        assert experts.with_role("replicas") is experts.axes["edp"]
        assert experts.over("ep", "edp").ranks == tuple(range(rank - rank % 12, rank - rank % 12 + 12))
        names = [axis.name for axis in topology.groups()]
        assert names == ["pp", "dp", "cp", "tp", "dp_cp", "cp_tp", "edp", "ep", "etp", "edp_ep", "world"]


def test_a_factoring_needs_the_same_ranks_on_a_shared_axis() -> None:
    shifted = replace(EXPERTS, axes=(*EXPERTS.axes[1:], PP), groups=())
    with (
        pytest.raises(AssertionError, match="pp has other ranks in experts"),
        Topology.fake(options((MODEL, shifted), pp=2, tp=2), 4, 0),
    ):
        pass


def test_a_world_without_process_groups() -> None:
    topology = Topology.alone()
    assert topology.coordinates == {"pp": 0, "dp": 0, "tp": 0}
    assert topology.replicas is topology.dp
    assert topology.is_first_outside()


def test_nodes_hold_whole_neighbours_inside_all_inner_axes() -> None:
    """A trial axis inside of the replicas doubles the ranks between two of them."""
    mesh = replace(with_trial(options(tp=2, dp=4), OUTSIDE_TP), shard_degree=0)
    sizes = mesh.sizes_in(16)
    assert mesh.shard_degree_in(sizes, 8) == 2
    assert mesh.shard_degree_in(sizes, 16) == 4
    with pytest.raises(UserError, match="two complete replicas of --trial 2 x --tp 2 that divide the 4"):
        mesh.shard_degree_in(sizes, 4)


def test_traffic_names_every_axis_and_refuses_other_groups() -> None:
    with Topology.fake(with_trial(options(tp=2, dp=2), INNERMOST), 8, 0, device="cpu") as topology:
        other = dist.new_group([0, 1])
        with Traffic(topology) as traffic:
            for axis in topology.groups():
                dist.all_reduce(torch.ones(2), group=axis.group)
        names = {call.axis: count for call, count in traffic.calls.items()}
        assert names == dict.fromkeys((*INNERMOST.names, "world"), 1)
        with pytest.raises(KeyError), Traffic(topology):
            dist.all_reduce(torch.ones(2), group=other)
    assert CollectiveCall("trial", "all-reduce", "float32", 8) in traffic.calls


def test_the_number_of_ranks_is_that_of_the_table() -> None:
    assert math.prod(options((WITH_CP,), tp=2, cp=3).sizes_in(24).values()) == 24
    assert WITH_CP.names_of("replicas") == ("dp", "cp", "dp_cp")
    assert [axis.name for axis in WITH_CP.by_flag] == ["tp", "pp", "dp", "cp"]
    assert [axis.name for axis in WITH_CP.weights_first] == ["pp", "tp", "dp", "cp"]
