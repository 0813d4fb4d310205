"""Planned memory, compared with the model's own tensors, and the formulas of the ZeRO stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.axes import MeshOptions
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.plan.dry_run.dry_run import dry_run_of
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import (
    TIGHT_SHARE,
    choose_gathering,
    embedding_bytes,
    host_activations,
    peaks,
    rank_memories,
    stage_bytes,
)
from tests.live_bytes import LiveBytes
from tests.stages import build_stage
from tests.unit.plan.test_parameters import run_of

GPT = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=2,
    seq_length=32,
    vocab_size=128,
    params_dtype="fp64",
)
# As on a GPU: torch on a CPU keeps more of an RMSNorm, and copies shared keys and values.
LLAMA = replace(
    GPT,
    position_embedding_type="rope",
    activation="swiglu",
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
MODELS = {"gpt": GPT, "gpt, fused attention": replace(GPT, attention_dropout=0.0), "llama": LLAMA}
RECOMPUTE = {
    "nothing": RecomputeConfig(),
    "full": RecomputeConfig(recompute_granularity="full"),
    "two layers at a time": RecomputeConfig(recompute_granularity="full", recompute_num_layers=2),
    "parts": RecomputeConfig(
        recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act", "layernorm")
    ),
    "mlp": RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
}
SLACK = 0.04
"""Statistics of norms and of fused attention."""


def _kept(topology: Topology, model: ModelConfig, num_layers: int, recompute: RecomputeConfig) -> float:
    stage = build_stage(model, topology, range(num_layers), seed=3, recompute=recompute)
    ids = torch.zeros(2, GPT.seq_length, dtype=torch.int64)
    microbatch = Microbatch(ids, ids, torch.arange(2))
    stage(microbatch, None)  # tables that are made once
    with LiveBytes() as memory:
        loss = stage(microbatch, None)
        kept = memory.count()
        del loss
    return kept / 8


QUICK = {("gpt", "nothing"), ("gpt, fused attention", "full"), ("llama", "parts"), ("llama", "mlp")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in QUICK else pytest.mark.slow)
        for name in MODELS
        for mode in RECOMPUTE
    ],
)
def test_activations_are_those_that_the_model_keeps(name: str, mode: str, one_rank: Topology) -> None:
    model, recompute = MODELS[name], RECOMPUTE[mode]
    run = run_of(model, 1, 1)
    config = replace(
        run.config, recompute=recompute, training=replace(run.config.training, micro_batch_size=2)
    )
    run = replace(run, config=config)
    # A GPU has no kernel of fused attention in fp64, and the plan is of a GPU.
    run = replace(run, config=replace(config, model=replace(model, params_dtype="fp32")))
    planned = (stage_bytes(run, (0,) * 4) - stage_bytes(run, (0,) * 2)) / 4
    kept = _kept(one_rank, model, 4, recompute) - _kept(one_rank, model, 2, recompute)
    assert kept == pytest.approx(planned, rel=SLACK)


def test_recomputed_layers_keep_shared_keys(one_rank: Topology) -> None:
    recompute, planned, kept = RECOMPUTE["full"], [], []
    for num_shared, kinds in ((0, (0,) * 4), (2, (0, 1, 2, 2))):
        # Without norms, keys and values are views that keep the queries too.
        norms = {"qk_layernorm": True, "value_layernorm": True}
        model = replace(LLAMA, num_kv_shared_layers=num_shared, **norms)
        run = run_of(model, 1, 1)
        training = replace(run.config.training, micro_batch_size=2)
        run = replace(run, config=replace(run.config, recompute=recompute, training=training))
        planned.append(stage_bytes(run, kinds) / 8)  # in fp64
        kept.append(_kept(one_rank, model, 4, recompute))
    assert planned[1] - planned[0] == kept[1] - kept[0] > 0


def test_embeddings_for_layers_are_kept(one_rank: Topology) -> None:
    without = replace(LLAMA, norm_position="sandwich", activation="geglu")
    model = replace(without, hidden_size_per_layer_input=24)
    kept = [_kept(one_rank, each, 4, RECOMPUTE["full"]) for each in (without, model)]
    run = run_of(model, 1, 1)
    training = replace(run.config.training, micro_batch_size=2)
    run = replace(run, config=replace(run.config, training=training))
    assert kept[1] - kept[0] == pytest.approx(embedding_bytes(run, 0) / 8, rel=SLACK)


def test_later_stages_keep_the_embeddings_that_they_receive() -> None:
    without = replace(LLAMA, norm_position="sandwich", activation="geglu")
    model = replace(without, hidden_size_per_layer_input=24)
    kept = []
    with Topology.fake(MeshOptions({"pp": 2, "dp": 1}), 2, 1, "cpu") as topology:
        for each in (without, model):
            stage = build_stage(each, topology, (2, 3), seed=3, recompute=RECOMPUTE["full"])
            ids = torch.zeros(2, each.seq_length, dtype=torch.int64)
            shape = each.seq_length, 2, each.stage_output_size
            message = torch.zeros(shape, dtype=torch.float64).requires_grad_()
            loss = stage(Microbatch(ids, ids, torch.arange(2)), message)  # tables that are made once
            with LiveBytes() as memory:
                received = message.detach().clone().requires_grad_()
                loss = stage(Microbatch(ids, ids, torch.arange(2)), received)
                kept.append(memory.count() / 8)
                del loss, received
    run = run_of(model, 1, 2)
    training = replace(run.config.training, micro_batch_size=2)
    run = replace(run, config=replace(run.config, training=training))
    assert kept[1] - kept[0] == pytest.approx(embedding_bytes(run, 1) / 8, rel=SLACK)


def offloading(num_layers: int, schedule: str, pp: int) -> PlannedRun:
    run = run_of(replace(GPT, num_layers=16), 1, pp)
    parallel = replace(run.config.parallel, pipeline_schedule=schedule)
    training = replace(run.config.training, global_batch_size=32)
    recompute = RecomputeConfig(cpu_offload_activations=num_layers)
    config = replace(run.config, parallel=parallel, training=training, recompute=recompute)
    return replace(run, config=config)


@pytest.mark.parametrize(("schedule", "linear_inputs"), [("1f1b", 0.0), ("zb-h1", 7 / 16)])
def test_offloaded_layers_hold_two_layers_and_what_deferred_gradients_need(
    schedule: str, linear_inputs: float
) -> None:
    """Leave of 16 elements those of linear layers' inputs for each microbatch with deferred gradients."""
    without, offloaded = (offloading(num, schedule, 4) for num in (0, 4))
    layer = stage_bytes(without, (0,))
    for rank, (peak, deferred) in enumerate(zip(*peaks(without), strict=True)):
        assert rank_memories(without)[rank].activations == pytest.approx(4 * layer * peak)
        kept = 2 + 4 * deferred * linear_inputs
        assert rank_memories(offloaded)[rank].activations == pytest.approx(kept * layer, rel=2e-3)
        assert host_activations(offloaded)[rank] == pytest.approx(4 * layer * peak)
        assert (deferred > 0) == (schedule == "zb-h1")


@pytest.mark.parametrize(
    ("zero_stage", "bytes_of"),
    [
        (0, lambda d: 18),
        (1, lambda d: 6 + 12 / d),
        (2, lambda d: 2 + 16 / d),
        (3, lambda d: 18 / d),
    ],
)
@pytest.mark.parametrize("dp", [2, 8])
def test_bytes_of_a_parameter(zero_stage: int, bytes_of, dp: int) -> None:
    run = run_of(replace(GPT, params_dtype="bf16"), 1, 1)
    parallel = replace(run.config.parallel, zero_stage=zero_stage)
    cluster = replace(run.cluster, world_size=dp)
    run = replace(run, config=replace(run.config, parallel=parallel), cluster=cluster)
    (memory,) = rank_memories(run)
    state = memory.weights + memory.gradients + memory.optimizer
    assert state == pytest.approx(bytes_of(dp) * run.ranks[0].size)


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "bytes_of"),
    [
        ("tp2+sp", 3, 2),
        ("pp2zb", 3, 2),
        ("dp2+zero1+gather", 2, 2),
        ("tp1", 1, 0),
        ("dp2+zero3", 3, 0),
    ],
)
def test_copies_in_8_bits_are_those_of_a_dry_run(layout: str, num_microbatches: int, bytes_of: int) -> None:
    """Compare the peaks with and without them; without, a weight of 4 h^2 elements is rounded at the peak."""
    peaks, planned = [], []
    for is_cached in (True, False):
        parsed = Layout.parse(layout)
        training = TrainingConfig(
            train_iters=1, micro_batch_size=1, fp8_format="hybrid", fp8_weight_cache=is_cached
        )
        config = Config(
            model=replace(GPT, params_dtype="bf16", num_layers=8),
            optimizer=OptimizerConfig(lr=1e-3),
            data=DataConfig(mock_data=True),
            training=training,
        )
        config = parsed.apply(config, num_microbatches * parsed.size("dp"))
        peaks.append(dry_run_of(config, parsed.world_size, 0).counts.peak_bytes)
        run = run_of(config.model, parsed.size("tp"), parsed.size("pp"))
        cluster = replace(run.cluster, world_size=parsed.world_size)
        planned.append(rank_memories(replace(run, config=config, cluster=cluster))[0].weights)
    square = GPT.hidden_size**2 / parsed.size("tp")
    copies = bytes_of * 8 * 12 * square / parsed.size("pp")
    assert planned[0] - planned[1] == copies
    assert peaks[0] - peaks[1] == pytest.approx(copies, abs=20 * square)


@pytest.mark.parametrize(("layout", "num_microbatches", "saved"), [("dp2+zero1", 2, 2), ("dp2+zero2", 1, 1)])
def test_weights_gathered_in_8_bits_are_those_of_a_dry_run(
    layout: str, num_microbatches: int, saved: int
) -> None:
    """A weight has 1 byte, and its transposed copy another, instead of 2 bytes and two copies of 1."""
    peaks, planned, parsed = [], [], Layout.parse(layout)
    for gathers in (False, True):
        training = TrainingConfig(
            train_iters=1, micro_batch_size=1, fp8_format="hybrid", fp8_param_gather=gathers
        )
        config = Config(
            model=replace(GPT, params_dtype="bf16", num_layers=8),
            optimizer=OptimizerConfig(lr=1e-3),
            data=DataConfig(mock_data=True),
            training=training,
        )
        config = parsed.apply(config, num_microbatches * parsed.size("dp"))
        found = dry_run_of(config, parsed.world_size, 0)
        peaks.append(found.counts.buffers.total + found.counts.peak_bytes)
        run = run_of(config.model, 1, 1)
        cluster = replace(run.cluster, world_size=parsed.world_size)
        planned.append(rank_memories(replace(run, config=config, cluster=cluster))[0].weights)
    square = GPT.hidden_size**2
    assert planned[0] - planned[1] == saved * 8 * 12 * square
    assert peaks[0] - peaks[1] == pytest.approx(planned[0] - planned[1], abs=20 * square)


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2+sp", "pp2zb", "pp2+full", "tp1+selective", "cp2"])
def test_modules_of_later_tokens_save_what_a_dry_run_counts(layout: str) -> None:
    """Compare the last stage with and without them: activations, and for one microbatch logits."""
    peaks, planned, parsed = [], [], Layout.parse(layout)
    for depth in (0, 2):
        model = replace(LLAMA, params_dtype="bf16", hidden_size=256, num_attention_heads=4, seq_length=256)
        config = Config(
            model=replace(model, mtp_num_layers=depth),
            optimizer=OptimizerConfig(lr=1e-3),
            data=DataConfig(mock_data=True),
            training=TrainingConfig(train_iters=1, micro_batch_size=2),
        )
        config = parsed.apply(config, 8)
        peaks.append(dry_run_of(config, parsed.world_size, parsed.world_size - 1).counts.peak_bytes)
        run = run_of(config.model, parsed.size("tp"), parsed.size("pp"))
        cluster = replace(run.cluster, world_size=parsed.world_size)
        memory = rank_memories(replace(run, config=config, cluster=cluster))[-1]
        planned.append(memory.activations + memory.logits + memory.workspace)
    assert planned[1] - planned[0] == pytest.approx(peaks[1] - peaks[0], rel=0.2)


def test_zero_2_keeps_the_gradient_of_a_tied_embedding_full() -> None:
    run = run_of(replace(GPT, params_dtype="bf16"), 1, 4)
    parallel = replace(run.config.parallel, zero_stage=2)
    cluster = replace(run.cluster, world_size=8)
    run = replace(run, config=replace(run.config, parallel=parallel), cluster=cluster)
    table = GPT.vocab_size * GPT.hidden_size
    for rank, full in enumerate((table, 0, 0, table)):
        expected = 4 * (full + (run.ranks[rank].size - full) / 2)
        assert rank_memories(run)[rank].gradients == pytest.approx(expected)


def test_the_first_stage_holds_the_most_microbatches() -> None:
    memories = rank_memories(run_of(GPT, 1, 4))
    activations = [memory.activations for memory in memories]
    assert activations == [pytest.approx(activations[-1] * in_flight) for in_flight in (4, 3, 2, 1)]
    assert [memory.logits > 0 for memory in memories] == [False, False, False, True]


def sharded_pipeline(choice: str, gpu_gib: float) -> PlannedRun:
    run = run_of(replace(GPT, params_dtype="bf16", num_layers=8, hidden_size=1024, vocab_size=50_000), 1, 2)
    parallel = replace(run.config.parallel, zero_stage=3, fsdp_reshard_after_forward=choice)
    gpu = replace(run.cluster.gpu, memory_gib=gpu_gib + 0.6, residual_gb=0.0)  # of which the driver keeps 0.6
    cluster = replace(run.cluster, world_size=16, gpu=gpu)
    return choose_gathering(replace(run, config=replace(run.config, parallel=parallel), cluster=cluster))


def test_a_pipeline_keeps_the_weights_that_fit() -> None:
    """A stage has four layers, 2 bytes an element."""
    freed, kept = (sharded_pipeline(choice, 80.0) for choice in ("always", "never"))
    layers = 4 * 12 * 1024 * 1024
    difference = rank_memories(kept)[0].weights - rank_memories(freed)[0].weights
    assert difference == pytest.approx(2 * layers, rel=0.01)
    largest = max(memory.total for memory in rank_memories(kept)) / 2**30
    assert largest > max(memory.total for memory in rank_memories(freed)) / 2**30
    assert sharded_pipeline("default", largest / TIGHT_SHARE * 1.01).gathers_once
    assert not sharded_pipeline("default", largest / TIGHT_SHARE * 0.99).gathers_once
    assert not sharded_pipeline("always", 80.0).gathers_once
    assert sharded_pipeline("never", 0.01).gathers_once


def test_without_a_pipeline_weights_are_freed() -> None:
    run = sharded_pipeline("default", 80.0)
    parallel = replace(run.config.parallel, pipeline_model_parallel_size=1)
    assert run.gathers_once
    assert not choose_gathering(replace(run, config=replace(run.config, parallel=parallel))).gathers_once


@pytest.mark.parametrize(("layout", "shares"), [("tp2", 1), ("dp2", 1), ("dp2+zero1", 2), ("dp2+zero3", 2)])
def test_averages_are_sharded_like_the_optimizer_s_state(layout: str, shares: int) -> None:
    counted, planned = [], []
    for decay in (None, 0.99):
        parsed = Layout.parse(layout)
        config = Config(
            model=replace(GPT, params_dtype="bf16", num_layers=4),
            optimizer=OptimizerConfig(ema_decay=decay),
            data=DataConfig(mock_data=True),
            training=TrainingConfig(train_iters=1, micro_batch_size=1),
        )
        config = parsed.apply(config, parsed.size("dp"))
        counted.append(dry_run_of(config, parsed.world_size, 0).counts.buffers)
        run = run_of(config.model, parsed.size("tp"), parsed.size("pp"))
        cluster = replace(run.cluster, world_size=parsed.world_size)
        planned.append(rank_memories(replace(run, config=config, cluster=cluster))[0].optimizer)
    size = run.ranks[0].size
    assert planned[1] - planned[0] == pytest.approx(4 * size / shares)
    assert counted[0].averages == 0
    assert counted[1].averages == counted[1].total - counted[0].total
    assert counted[1].averages == pytest.approx(4 * size / shares, rel=0.03)  # with padding


@pytest.mark.parametrize("layout", ["tp2", "dp2+zero1"])
def test_muon_saves_the_second_moments_that_a_dry_run_lacks(layout: str) -> None:
    moments, planned = [], []
    for optimizer in ("adam", "muon"):
        parsed = Layout.parse(layout)
        config = Config(
            model=replace(GPT, params_dtype="bf16", num_layers=4),
            optimizer=OptimizerConfig(optimizer=optimizer),
            data=DataConfig(mock_data=True),
            training=TrainingConfig(train_iters=1, micro_batch_size=1),
        )
        config = parsed.apply(config, parsed.size("dp"))
        moments.append(dry_run_of(config, parsed.world_size, 0).counts.buffers.moments)
        run = run_of(config.model, parsed.size("tp"), parsed.size("pp"))
        cluster = replace(run.cluster, world_size=parsed.world_size)
        planned.append(rank_memories(replace(run, config=config, cluster=cluster))[0].optimizer)
    saved = planned[0] - planned[1]
    assert saved == 4 * 4 * 12 * GPT.hidden_size**2 / 2
    assert moments[0] - moments[1] == pytest.approx(saved, rel=0.01)  # with padding


def test_rounded_moments_have_the_bytes_of_a_dry_run() -> None:
    moments, planned = [], []
    for dtypes in ({}, {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"}):
        config = Config(
            model=replace(GPT, params_dtype="bf16", num_layers=4),
            optimizer=OptimizerConfig(**dtypes),
            data=DataConfig(mock_data=True),
            training=TrainingConfig(train_iters=1, micro_batch_size=1, global_batch_size=1),
        )
        moments.append(dry_run_of(config, 1, 0).counts.buffers.moments)
        run = run_of(config.model, 1, 1)
        planned.append(rank_memories(replace(run, config=config))[0].optimizer)
    assert moments[1] * 8 == moments[0] * 3
    assert planned[0] - planned[1] == pytest.approx(moments[0] - moments[1], rel=0.01)  # with padding
