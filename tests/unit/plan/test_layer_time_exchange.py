"""Planned messages of expert parallelism, compared with those of a dry run, and their time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.parallel import CpCommType
from megalite.config.presets import PRESETS
from megalite.observe.unit_record import CollectiveCall
from megalite.observe.verify.layouts import Layout
from megalite.plan.communication import PROTOCOLS, Cluster, Group
from megalite.plan.dry_run.counts import Counts
from megalite.plan.dry_run.dry_run import dry_run_of
from megalite.plan.iteration_time import time_iteration
from megalite.plan.kernel_time import attention_seconds
from megalite.plan.layer_time import ep_seconds, model_work, phase_work
from megalite.plan.layout_fields import layout_flags, layout_name
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import RankMemory, rank_memories
from megalite.utils.hardware.gpus import GPUS

MODEL = replace(
    PRESETS["llama-tiny"],
    **{"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 512},
    **{"num_experts": 8, "moe_ffn_hidden_size": 128, "params_dtype": "bf16", "moe_layer_freq": (0, 1, 1, 1)},
)
GPU = GPUS["h100-80"]


HYBRID = replace(
    PRESETS["nemotron-h-tiny"],
    **{"hidden_size": 256, "num_attention_heads": 4, "mamba_num_groups": 4, "seq_length": 256},
    **{"vocab_size": 512, "params_dtype": "bf16", "mtp_num_layers": 1, "hybrid_override_pattern": "*-MM"},
)


def config_of(layout: str, imbalance: float = 1.0, model: ModelConfig = MODEL) -> tuple[Config, int]:
    """Return a run in a layout, with four microbatches, and its world size."""
    parsed = Layout.parse(layout)
    config = Config(
        model=model,
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(mock_data=True),
        parallel=ParallelConfig(moe_imbalance=imbalance),
        training=TrainingConfig(train_iters=1, micro_batch_size=2),
    )
    return parsed.apply(config, 8 * parsed.num_sample_ranks), parsed.world_size


@cache
def both(layout: str, imbalance: float = 1.0, model: ModelConfig = MODEL) -> tuple[PlannedRun, Counts]:
    """Return the plan of a run, and the counts of its rank in the last stage."""
    config, world_size = config_of(layout, imbalance, model)
    cluster = Cluster(GPU, world_size, 8, GPU.node_gbps, GPU.network_gbps)
    run = PlannedRun(config, cluster)
    return run, dry_run_of(config, world_size, world_size - 1).counts


LAYOUTS = ["dp4ep4", "tp2pp2dp2ep4etp1+sp", "tp2dp2ep2etp2+sp+zero1", "dp2cp2ep2+zero3", "dp4ep2+zero2"]


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
@pytest.mark.parametrize("layout", [*LAYOUTS, "tp2dp2ep2etp2+sp+zero1+allgather"])
def test_messages_of_experts_are_those_of_a_dry_run(layout: str, imbalance: float) -> None:
    run, counts = both(layout, imbalance)
    planned: Counter[CollectiveCall] = Counter()
    for kind in run.ranks[-1].kinds:
        for phase in run.units.layers[kind].phases():
            for each in phase.collectives:
                if each.call.is_over_experts:
                    planned[each.call] += run.num_microbatches
    assert planned
    assert planned == {call: count for call, count in counts.calls.items() if call.is_over_experts}


@pytest.mark.parametrize("layout", ["dp4ep4", "dp4"])
def test_dropped_tokens_are_neither_sent_nor_computed(layout: str) -> None:
    """Half a capacity halves messages and GEMMs of experts; a capacity above the mean changes nothing."""
    half, whole, ample = (
        both(layout, model=replace(MODEL, moe_expert_capacity_factor=factor)) for factor in (0.5, None, 1.5)
    )
    rows_sent = [
        {call.num_bytes for call in counts.calls if call.kind == "all-to-all" and call.dtype == "bfloat16"}
        for _, counts in (half, whole, ample)
    ]
    assert rows_sent[0] == {size // 2 for size in rows_sent[1]}
    assert rows_sent[2] == rows_sent[1]
    assert bool(rows_sent[1]) == ("ep" in layout)
    rows = [
        sum(gemm.m for gemm in run.units.layers[1].forward.gemms if gemm.k == 128)
        for run, _ in (half, whole, ample)
    ]
    assert rows[0] == rows[1] // 2 > 0
    assert rows[2] == rows[1]
    assert half[0].units.layers[1].saved_bytes < whole[0].units.layers[1].saved_bytes


def test_messages_of_recurrent_layers_are_those_of_a_dry_run() -> None:
    """The last stage has Mamba-2 in both layers, and in its module of multi-token prediction."""
    run, counts = both("tp2pp2dp2cp2+sp", model=HYBRID)
    units = [*(run.units.layers[kind] for kind in run.ranks[-1].kinds), run.units.head]
    phases = [phase for unit in units for phase in unit.phases()]
    planned = Counter(each.call for phase in phases for each in phase.collectives if each.call.axis == "cp")
    assert planned.total() == 3 * 2 * 2
    assert counts.calls.items() >= {call: run.num_microbatches * planned[call] for call in planned}.items()
    assert sum(phase_work(run, phase, "forward").cp for phase in phases) == pytest.approx(
        sum(Group(run.cluster, 2, 2).all_to_all_seconds(call.num_bytes) * planned[call] for call in planned)
    )


COMM_TYPES: tuple[CpCommType, ...] = ("p2p", "a2a", "all_gather", "a2a")
MESSAGES = {"p2p": {"send", "receive"}, "a2a": {"all-to-all"}, "all_gather": {"all-gather", "reduce-scatter"}}
"""Kinds of the messages over cp that attention has with each communication type."""


def test_later_tokens_in_documents_are_planned_for_recurrent_layers_over_cp() -> None:
    """Documents are of whole samples, and later tokens are the rank's."""
    config, world_size = config_of("cp2", model=HYBRID)
    cluster = Cluster(GPU, world_size, 8, GPU.node_gbps, GPU.network_gbps)
    data = replace(config.data, reset_attention_mask=True)
    plain, packed = (
        rank_memories(PlannedRun(each, cluster))[0] for each in (config, replace(config, data=data))
    )
    assert packed.activations >= plain.activations > 0


def dense_of(comm_types: CpCommType | tuple[CpCommType, ...]) -> tuple[PlannedRun, Counts]:
    """Return the plan of a dense run whose layers have these types, and the counts of rank 1."""
    parallel = ParallelConfig(context_parallel_size=4, cp_comm_type=comm_types)
    model = replace(MODEL, num_experts=None, moe_ffn_hidden_size=None, moe_layer_freq=None)
    training = TrainingConfig(train_iters=1, micro_batch_size=2, global_batch_size=8)
    data, optimizer = DataConfig(mock_data=True), OptimizerConfig(lr=1e-3)
    config = Config(model=model, optimizer=optimizer, data=data, parallel=parallel, training=training)
    cluster = Cluster(GPU, 4, 8, GPU.node_gbps, GPU.network_gbps)
    return PlannedRun(config, cluster), dry_run_of(config, 4, 1).counts


def test_each_layer_is_planned_by_its_comm_type() -> None:
    """A layer sends, saves and takes what it does in a run in which all layers have its type."""
    run, counts = dense_of(COMM_TYPES)
    kinds, work = run.units.kinds, model_work(run)
    assert kinds == (0, 1, 2, 1)
    for comm_type, kinds_of_messages in MESSAGES.items():
        alone, all_counts = dense_of(comm_type)  # type: ignore[arg-type]
        numbers = [number for number, each in enumerate(COMM_TYPES) if each == comm_type]
        own = {
            call: n
            for call, n in counts.calls.items()
            if call.axis == "cp" and call.kind in kinds_of_messages
        }
        of_all = {
            call: n
            for call, n in all_counts.calls.items()
            if call.axis == "cp" and call.kind in kinds_of_messages
        }
        assert own and own == {call: n * len(numbers) // 4 for call, n in of_all.items()}
        for number in numbers:
            assert run.units.layers[kinds[number]] == alone.units.layers[0]
            assert work.layers[kinds[number]] == model_work(alone).layers[0]
        (call,) = alone.units.layers[0].forward.attention
        assert call.exchange == alone.config.parallel.key_exchanges[0]
    assert len({saved.saved_bytes for saved in run.units.layers.values()}) == 3
    assert "+" not in layout_name(run)
    assert "--cp-comm-type p2p a2a all_gather a2a" in " ".join(layout_flags(run.config))


@pytest.mark.parametrize(("comm_type", "in_blocks"), [("p2p", True), ("all_gather", True), ("a2a", False)])
def test_blocks_of_queries_are_not_timed_as_cudnn(comm_type: CpCommType, in_blocks: bool) -> None:
    run, _ = dense_of(comm_type)
    config = replace(run.config, model=replace(run.config.model, attention_backend="flash"))
    without = replace(run, config=config)
    (call,) = run.units.layers[0].forward.attention
    assert (attention_seconds(run, call) == attention_seconds(without, call)) == in_blocks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_what_a_dry_run_counts(layout: str) -> None:
    run, counts = both(layout)
    memory: RankMemory = rank_memories(run)[-1]
    assert run.ranks[-1].size == counts.num_parameters
    buffers = counts.buffers
    state = buffers.main_weights + buffers.moments
    assert memory.gradients == pytest.approx(buffers.gradients, rel=0.03)  # with padding
    if run.zero_stage == 3:  # the main weights are the weights
        assert memory.optimizer == pytest.approx(buffers.weights + state, rel=0.03)
    else:
        assert memory.optimizer == pytest.approx(state, rel=0.03)
        assert memory.weights == pytest.approx(buffers.weights, rel=0.03)


@pytest.mark.parametrize("layout", ["dp4ep4", "dp4ep4+allgather", "tp2pp2dp2ep4etp1+sp"])
def test_the_busiest_rank_saves_what_a_dry_run_counts(layout: str) -> None:
    """Compare what more tokens add at the peak: their activations, or their gradients in a layer."""
    planned, counted = [], []
    for imbalance in (1.0, 2.0):
        run, counts = both(layout, imbalance)
        memory = rank_memories(run)[-1]
        planned.append(memory.activations + memory.logits + memory.workspace)
        counted.append(counts.peak_bytes)
    assert planned[1] - planned[0] == pytest.approx(counted[1] - counted[0], rel=0.2)


def test_messages_within_a_node_and_between_nodes() -> None:
    cluster = Cluster(GPU, 64, 8, 200.0, 40.0)
    simple, share = PROTOCOLS[-1], GPU.link_share * 1e9
    inside = Group(cluster, 8, 1).all_to_all_seconds(8e9)
    assert inside == pytest.approx(simple.start + simple.node_hop + 7e9 / (200 * share))
    # Of 64 parts, 7 stay in the node at the same time, and 56 leave it.
    outside = Group(cluster, 64, 1).all_to_all_seconds(64e9)
    assert outside == pytest.approx(simple.start + simple.network_hop + 56e9 / (40 * share))
    assert Group(cluster, 1, 1).all_to_all_seconds(1e9) == 0.0


def test_a_layer_sends_its_rows_there_and_back() -> None:
    """Each of a token's two experts gets its hidden state and its weight, and returns the output."""
    config, world_size = config_of("dp4ep4")
    cluster = Cluster(GPU, world_size, 8, GPU.node_gbps, GPU.network_gbps)
    run = PlannedRun(config, cluster)
    rows = 2 * 2 * MODEL.seq_length
    group = Group(cluster, 4, 1)
    sizes = (8 * 4, 2 * 256 * rows, 2 * rows, 2 * 256 * rows)  # counts are int32
    forward = ep_seconds(run, run.units.layers[1].forward)
    assert forward == pytest.approx(sum(map(group.all_to_all_seconds, sizes)))
    assert ep_seconds(run, run.units.layers[0].forward) == 0.0


def test_a_layer_gathers_tokens_and_reduce_scatters_outputs() -> None:
    """Each rank gets the hidden states of four ranks' tokens, with two weights and numbers of experts."""
    config, world_size = config_of("dp4ep4+allgather")
    cluster = Cluster(GPU, world_size, 8, GPU.node_gbps, GPU.network_gbps)
    run = PlannedRun(config, cluster)
    tokens = 4 * 2 * MODEL.seq_length
    sizes = (2 * 256 * tokens, 2 * 2 * tokens, 8 * 2 * tokens, 2 * 256 * tokens)
    work = phase_work(run, run.units.layers[1].forward, "forward")
    assert work.ep == pytest.approx(sum(map(Group(cluster, 4, 1).gather_seconds, sizes)))
    assert work.tp == 0.0


def test_experts_of_one_rank_are_not_summed() -> None:
    """With ep over all ranks, only the other weights have replicas."""
    seconds, reduced = [], []
    for layout in ("dp4", "dp4ep2", "dp4ep4"):
        config, world_size = config_of(layout)
        cluster = Cluster(GPU, world_size, 8, GPU.node_gbps, GPU.network_gbps)
        run = PlannedRun(config, cluster)
        work = time_iteration(run).work
        seconds.append(work.ep)
        reduced.append(work.dp)
    assert seconds[0] == 0.0 < seconds[1] < seconds[2]
    assert reduced[0] > reduced[1] > reduced[2] > 0.0
