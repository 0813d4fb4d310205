"""Boxes, their copies and the sums of gradients, on every rank of a world with two meshes."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.distributed.axes import MeshOptions
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.counter_random import fill_initial
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter, num_used
from megalite.tensor_parallel.placement import Cut, ParameterAxes
from megalite.utils.errors import UserError
from tests.trial_axis import EXPERTS, TWO_CUTTING_AXES

MESH = MeshOptions({"tp": 2, "tq": 3, "dp": 2, "ep": 4}, (TWO_CUTTING_AXES, EXPERTS))
WORLD_SIZE = 12
SHAPE = (12, 6, 24)
CUTS: list[tuple[Cut, ...]] = [
    (),
    (Cut("tp", 0),),
    (Cut("tq", 2),),
    (Cut("tp", 0), Cut("tq", 1)),
    (Cut("tp", 2), Cut("tq", 0)),
    (Cut("tp", 1), Cut("tq", 2)),
    (Cut("tp", 1), Cut("tq", 1)),
    (Cut("tq", 1), Cut("tp", 1)),
    (Cut("tp", 0), Cut("tq", 0)),
    (Cut("ep", 0),),
    (Cut("ep", 2),),
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_boxes_fill_the_tensor_and_each_element_is_counted_once(cuts: tuple[Cut, ...]) -> None:
    spec = ParameterSpec(SHAPE, cuts, std=1.0, num_padding=5)
    held, counted, used = (torch.zeros(SHAPE, dtype=torch.int64) for _ in range(3))
    full = fill(spec.full_shape)
    for rank in range(WORLD_SIZE):
        with Topology.fake(MESH, WORLD_SIZE, rank, device="cpu") as topology:
            box = spec.box(topology)
            assert box.of(held).shape == box.shape
            box.of(held).add_(1)
            if spec.parameter_axes.acts(topology) and spec.parameter_axes.replicas(topology).is_first:
                box.of(counted).add_(1)
                mine = torch.arange(math.prod(box.shape)).view(box.shape)
                box.of(used).copy_(mine < num_used(spec, topology))
            values = torch.empty(box.shape, dtype=torch.float64)
            fill_initial(values, "name", spec, 3, topology)
            assert torch.equal(values, box.of(full))
    sizes = {"tp": 2, "tq": 3, "ep": 4}
    assert (held == WORLD_SIZE // math.prod(sizes[cut.axis] for cut in cuts)).all()
    assert (counted == 1).all()
    assert used.sum() == math.prod(spec.used_shape)
    assert used[: spec.used_shape[0]].all()


def fill(shape: tuple[int, ...]) -> torch.Tensor:
    """Return the initial values on one rank."""
    full = torch.empty(shape, dtype=torch.float64)
    fill_initial(full, "name", ParameterSpec(shape, std=1.0), 3, Topology.alone())
    return full


def test_the_first_of_two_cuts_of_a_dim_is_the_outermost() -> None:
    with Topology.fake(MESH, WORLD_SIZE, 4) as topology:  # dp 0, tq 2, tp 0
        assert ParameterSpec((12,), (Cut("tq", 0), Cut("tp", 0))).box(topology) == ((8,), (2,))
        assert ParameterSpec((12,), (Cut("tp", 0), Cut("tq", 0))).box(topology) == ((4,), (2,))


def test_a_gradient_is_partial_over_the_axis_of_the_sequence_unless_it_cuts_the_parameter() -> None:
    with Topology.fake(MESH, WORLD_SIZE, 0) as topology:
        cut_along_sequence = LayerContext(topology, torch.float32, sequence_parallel=True)
        for cuts, partial_over in {
            (): ("tp",),
            (Cut("tp", 0),): (),
            (Cut("tq", 0),): ("tp",),
            (Cut("ep", 0),): (),  # its replicas have other positions
        }.items():
            parameter_axes = new_parameter(ParameterSpec((12,), cuts), cut_along_sequence).spec.parameter_axes
            assert parameter_axes.partial_over == partial_over
            axis = parameter_axes.partial_axis(topology)
            assert axis is (topology.tp if partial_over else None)
            whole = new_parameter(ParameterSpec((12,), cuts), LayerContext(topology, torch.float32))
            assert whole.spec.parameter_axes == (parameter_axes.cut_over, ())
        both = new_parameter(
            ParameterSpec((12,), partial_over=("tq", "tp")), cut_along_sequence
        ).spec.parameter_axes
        assert both.partial_axis(topology) is topology.over("tp", "tq")
    with Topology.fake(MeshOptions({"dp": 2}), 2, 0) as topology:
        assert ParameterAxes((), ("tp",)).partial_axis(topology) is None  # one rank


def test_each_factoring_has_its_own_replicas() -> None:
    with Topology.fake(MESH, WORLD_SIZE, 7) as topology:
        assert ParameterAxes(("tp", "tq")).replicas(topology) is topology.dp
        assert ParameterAxes(("ep",)).replicas(topology) is topology.meshes["experts"].axes["edp"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ParameterSpec((12,), Cut("dp", 0)), "cut over dp, whose ranks hold the same .* over pp or tq or tp"),
        (
            ParameterSpec((12,), Cut("xp", 0)),
            r"over \['xp'\]: .* among \['pp', 'dp', 'cp', 'tq', 'tp'\] or \['pp'",
        ),
        (ParameterSpec((12,), (Cut("tp", 0), Cut("ep", 0))), r"over \['ep', 'tp'\]: all axes must be among"),
        (ParameterSpec((12,), partial_over=("dp",)), "partial over dp, which replicates the parameter"),
        (
            ParameterSpec((12,), Cut("tp", 0), partial_over=("tp",)),
            "partial over tp, which cuts",
        ),
        (
            ParameterSpec((4, 4), Cut("tq", 1)),
            r"shape \(4, 4\) cannot be cut along dim 1 over --tq 3",
        ),
        (ParameterSpec((8,), (Cut("tp", 0), Cut("tq", 0))), "cannot be cut along dim 0 over --tq 3"),
    ],
)
def test_a_cut_that_cannot_be_is_a_mistake(spec: ParameterSpec, message: str) -> None:
    with Topology.fake(MESH, WORLD_SIZE, 0) as topology, pytest.raises(UserError, match=message):
        new_parameter(spec, LayerContext(topology, torch.float32))


def test_the_old_name_of_position_ranges_warns(one_rank: Topology) -> None:
    context = LayerContext(one_rank, torch.float32)
    with pytest.warns(FutureWarning, match="position_ranges now"):
        assert context.runs_of_positions(8) == context.position_ranges(8) == (range(8),)
