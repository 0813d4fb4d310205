"""A token that is sent once to each node and rank takes fewer bytes than one message for each expert."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from megalite.plan.communication import Group, dispatch_seconds, ep_seconds, num_holders
from megalite.plan.planned_run import Cluster, PlannedRun
from megalite.plan.programs import PROGRAMS
from tests.unit.plan.test_communication_exchange_time import GPU, MODEL, config_of


def run_of(program: str = "megatron-core-deepep", layout: str = "dp4ep4", topk: int = 3) -> PlannedRun:
    """Return two nodes of two ranks, which divide 8 experts."""
    config = config_of(layout, model=replace(MODEL, moe_router_topk=topk))[0]
    return PlannedRun(config, Cluster(GPU, 4, 2, 450.0, 50.0), PROGRAMS[program])


@pytest.mark.parametrize("topk", [1, 3, 6])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_mean_over_all_choices_of_experts(num_parts: int, topk: int) -> None:
    choices = list(combinations(range(8), topk))
    holders = [len({expert * num_parts // 8 for expert in choice}) for choice in choices]
    assert num_holders(run_of(topk=topk), num_parts) == pytest.approx(sum(holders) / len(choices))


def test_consecutive_experts_have_few_holders() -> None:
    run = run_of("automodel-benchmark", topk=4)
    assert [num_holders(run, parts) for parts in (1, 2, 4, 8)] == [1.0, 1.0, 2.0, 4.0]


def test_bytes_inside_the_node_and_over_the_network() -> None:
    """A token of k rows goes to half of its nodes over the network, and half of its ranks over NVLink."""
    run, rows = run_of("automodel-benchmark", topk=4), 4e9
    group = Group(run.cluster, 4, 1)
    assert dispatch_seconds(run, group, rows) == group.exchange_seconds(1e9 * 2 / 2, 1e9 * 1 / 2)
    assert dispatch_seconds(run, group, rows) < group.all_to_all_seconds(rows) / 3
    assert dispatch_seconds(run, Group(run.cluster, 1, 1), rows) == 0.0


@pytest.mark.parametrize(("layout", "is_shorter"), [("dp4ep4", True), ("tp2dp2ep2etp2+sp", False)])
def test_a_rank_of_a_part_of_an_expert_gets_all_rows(layout: str, is_shorter: bool) -> None:
    run, other = run_of(layout=layout), run_of("megatron-core", layout)
    phase = run.units.layers[1].forward
    assert (ep_seconds(run, phase) < ep_seconds(other, phase)) == is_shorter
    assert ep_seconds(other, phase) > 0.0
