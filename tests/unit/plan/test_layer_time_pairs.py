"""Pairs of actions hide messages of experts under each other's computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.pipeline.schedules import training_actions
from megalite.pipeline.simulator import pairs_of_rank
from megalite.plan.communication import CONTENTION, Cluster
from megalite.plan.iteration_time import _stages, least_seconds, makespan, time_step
from megalite.plan.layer_time import LayerSeconds, hidden_seconds, model_work, pair_savings
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import rank_memories
from tests.unit.plan.test_layer_time_exchange import GPU, MODEL, config_of


def run_of(batch: int = 64, network_gbps: float = 50.0, **changes) -> PlannedRun:
    """Return two ranks in a pipeline, each with two experts' ranks on its own node."""
    config = config_of("pp2dpvdp4ep4", model=replace(MODEL, num_layers=8, moe_layer_freq=(1,)))[0]
    config = replace(
        config,
        training=replace(config.training, global_batch_size=2 * 4 * batch),
        parallel=replace(config.parallel, **changes),
    )
    return PlannedRun(config, Cluster(GPU, 8, 2, 450.0, network_gbps))


def test_the_shorter_of_messages_and_computation_is_hidden() -> None:
    one, other = LayerSeconds(messages=3.0, computation=5.0), LayerSeconds(messages=7.0, computation=2.0)
    assert hidden_seconds([one], [other]) == 2.0 + 5.0
    assert hidden_seconds([one, one], [other, LayerSeconds(1.0, 9.0)]) == 7.0 + 4.0
    assert hidden_seconds([one, one, one], [other]) == 7.0


def test_a_pair_is_shorter_by_the_messages_that_it_hides() -> None:
    run = run_of()
    layer = model_work(run).layers[0]
    forward, backward = (LayerSeconds.of(each) for each in (layer.forward, layer.backward_input))
    assert forward.messages > 0.0 < backward.messages
    expected = (1 - CONTENTION) * hidden_seconds([forward] * 2, [backward] * 2)
    assert set(pair_savings(run)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert list(pair_savings(run).values()) == pytest.approx([expected] * 4)


def test_an_iteration_is_shorter_by_its_pairs() -> None:
    run, slower = run_of(), run_of(pipeline_schedule="zb-v")
    hidden = time_step(slower).work.ep - time_step(run).work.ep
    assert hidden > 0.0
    assert time_step(run).seconds < time_step(slower).seconds - 0.5 * hidden
    # The makespan of many microbatches is extrapolated, to within 1%.
    assert least_seconds(run) <= makespan(run, _stages(run)) * 1.01


def test_pairs_are_those_of_all_microbatches() -> None:
    """A number of microbatches beyond those that are simulated is extrapolated."""
    run = run_of()
    for rank in range(2):
        groups = run.stages.groups(training_actions("dualpipev", run.stages, 64)[rank])
        forwards = [group[0].chunk for group in groups if len(group) == 2]
        counted = {chunk: forwards.count(chunk) for chunk in (0, 1)}
        assert counted[0] > 50
        assert pairs_of_rank("dualpipev", run.stages, 64, rank) == counted


def test_two_actions_hold_their_temporary_memory_at_once() -> None:
    paired, alone = (rank_memories(run_of(pipeline_schedule=name))[1] for name in ("dualpipev", "zb-v"))
    assert paired.workspace == 2 * alone.workspace


def test_without_messages_nothing_is_hidden() -> None:
    run = run_of(expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    assert pair_savings(run) == {}
    offloading = replace(run_of().config.recompute, cpu_offload_activations=1)
    assert pair_savings(replace(run_of(), config=replace(run_of().config, recompute=offloading))) == {}
