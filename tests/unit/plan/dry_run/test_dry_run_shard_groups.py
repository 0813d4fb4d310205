"""ZeRO within groups of replicas: what a dry run counts is what the planner's formulas say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megalite.observe.operator_log import CollectiveCall
from megalite.observe.verify.layouts import Layout
from megalite.plan.communication import Cluster
from megalite.plan.dry_run.dry_run import dry_run_of
from megalite.plan.iteration_time import exchange_seconds, gradient_bytes, sharing_of
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import rank_memories
from megalite.utils.hardware.gpus import GPUS
from tests.ranks.plan.dry_run.test_dry_run import MICROBATCHES, config_of

PADDING = 0.02
"""Share of the buckets that may be padding."""


def planned(name: str, dtype: str, messages: str | None = "bf16") -> PlannedRun:
    """A run on nodes of four GPUs, whose gradient messages have a dtype of their own."""
    layout = Layout.parse(name)
    gpu = GPUS["a100-80"]
    config = config_of(layout, dtype, {"attention_dropout": 0.0}, grad_communication_dtype=messages)
    config = replace(config, parallel=replace(config.parallel, ddp_bucket_size=None))
    cluster = Cluster(gpu, layout.world_size, 4, gpu.node_gbps, gpu.network_gbps)
    return PlannedRun(config, cluster)


def bytes_of(calls: Counter[CollectiveCall], axis: str) -> dict[str, int]:
    """Bytes of an axis by kind of collective."""
    total = Counter[str]()
    for call, count in calls.items():
        if call.axis == axis and call.num_bytes > 8:  # without the loss and the norm
            total[call.kind] += call.num_bytes * count
    return dict(total)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("tp", "shard"), [(1, 2), (1, 4), (2, 2), (1, 8), (1, 1)])
def test_collectives_and_memory_are_those_of_the_formulas(tp: int, shard: int, stage: int) -> None:
    run = planned(f"tp{tp}dp8shard{shard}+zero{stage}", "bf16")
    dry = dry_run_of(run.config, 8 * tp, 5)
    count, message = run.ranks[0].size, gradient_bytes(run)
    group, copies = sharing_of(run)
    assert (group.size, copies.size, copies.stride) == (shard, 8 // shard, tp * shard)
    assert group.is_inside_node is (tp * shard <= 4)
    calls = dry.counts.calls
    rounds = MICROBATCHES if stage == 2 else 1
    within = {"reduce-scatter": rounds * count * message, "all-gather": count * 2}
    if shard == 8:
        assert bytes_of(calls, "dp") == pytest.approx(within, rel=PADDING)
        assert not bytes_of(calls, "dp_shard") and not bytes_of(calls, "dp_replicate")
    elif shard == 1:
        assert bytes_of(calls, "dp") == pytest.approx({"all-reduce": count * message}, rel=PADDING)
        assert not bytes_of(calls, "dp_shard") and not bytes_of(calls, "dp_replicate")
    else:
        between = {"all-reduce": count * message / shard}
        assert not bytes_of(calls, "dp")
        assert bytes_of(calls, "dp_shard") == pytest.approx(within, rel=PADDING)
        assert bytes_of(calls, "dp_replicate") == pytest.approx(between, rel=PADDING)
    memory, held = rank_memories(run)[0], dry.counts.buffers
    assert held.weights == pytest.approx(memory.weights, rel=PADDING)
    assert held.gradients == pytest.approx(memory.gradients, rel=PADDING)
    assert held.main_weights + held.moments == pytest.approx(memory.optimizer, rel=PADDING)


@pytest.mark.parametrize("messages", [None, "bf16"])
@pytest.mark.parametrize("pipeline", ["", "pp2", "pp2zb"])
def test_shards_of_weights_are_all_reduced_once_an_iteration(pipeline: str, messages: str | None) -> None:
    run = planned(f"{pipeline}dp4shard2+zero3", "bf16", messages)
    calls = dry_run_of(run.config, 4 * run.pp, 0).counts.calls
    once = run.ranks[0].size * gradient_bytes(run) / 2
    assert bytes_of(calls, "dp_replicate") == pytest.approx({"all-reduce": once}, rel=PADDING)


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_inside_nodes_are_planned_to_exchange_faster(stage: int) -> None:
    """Between nodes, they send a shard where one group of all replicas sends everything."""
    one, groups = (planned(f"dp64{shard}+zero{stage}", "bf16") for shard in ("", "shard4"))
    assert exchange_seconds(groups, 0.0).seconds < exchange_seconds(one, 0.0).seconds
    assert rank_memories(groups)[0].optimizer == pytest.approx(16 * rank_memories(one)[0].optimizer)
