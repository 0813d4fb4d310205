"""Configs of layouts share groups of fields, and checks of shared groups find what all rules find."""

from __future__ import annotations

from itertools import product

import pytest

from megalite.plan.layout_configs import LayoutCheck, LayoutConfigs
from megalite.plan.layout_fields import with_even_stages, with_layout
from megalite.plan.planned_run import Cluster, first_problem
from tests.unit.plan.test_exchange_time import GPU, config_of

BASE = config_of("dp4ep4")[0]
CLUSTER = Cluster(GPU, 8, 8, 450.0, 50.0)
VALUES = {
    "tensor_model_parallel_size": (1, 2, 3),
    "pipeline_model_parallel_size": (1, 2, 3),
    "expert_model_parallel_size": (1, 4),
    "sequence_parallel": (False, True),
    "micro_batch_size": (1, 2, 5),
    "zero_stage": (0, 1),
    "recompute_granularity": (None, "full"),
}
CHOICES = [dict(zip(VALUES, values, strict=True)) for values in product(*VALUES.values())]


def test_configs_are_those_of_their_fields() -> None:
    configs = LayoutConfigs(BASE)
    assert all(configs.config(each) == with_even_stages(with_layout(BASE, **each)) for each in CHOICES[::7])
    assert any(configs.config(each).parallel.pipeline_layers for each in CHOICES)


def test_equal_groups_are_one_object() -> None:
    configs = LayoutConfigs(BASE)
    one, other = (configs.config({**CHOICES[0], "micro_batch_size": size}) for size in (1, 2))
    assert one.parallel is other.parallel
    assert one.training is not other.training


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_problem_is_that_of_all_rules(order: int) -> None:
    check, configs = LayoutCheck(CLUSTER.world_size), LayoutConfigs(BASE)
    layouts = [configs.config(each) for each in CHOICES[::order]]
    found = [check.first_problem(config) for config in layouts]
    assert found == [first_problem(config, CLUSTER) for config in layouts]
    assert len({problem.fields for problem in found if problem}) > 3
    assert None in found
