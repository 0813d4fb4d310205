"""Planned memory, compared with the model's own tensors, and the formulas of the ZeRO stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import ModelConfig, RecomputeConfig
from megalite.distributed.topology import Topology
from megalite.microbatch import Microbatch
from megalite.plan.iteration_time import peaks_deferred, peaks_in_flight
from megalite.plan.model_parameters import rank_parameters
from megalite.plan.planned_run import PROGRAMS, PlannedRun, Program, in_dtype
from megalite.plan.rank_memory import TIGHT_SHARE, choose_gathering, host_activations, rank_memories
from megalite.plan.saved_activations import kept_elements, stage_elements
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
    planned = stage_elements(run, 4) - stage_elements(run, 2)
    kept = _kept(one_rank, model, 4, recompute) - _kept(one_rank, model, 2, recompute)
    assert kept == pytest.approx(planned, rel=SLACK)


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
    layer = kept_elements(without) * without.element_bytes
    for rank, (peak, deferred) in enumerate(
        zip(peaks_in_flight(without), peaks_deferred(without), strict=True)
    ):
        assert rank_memories(without)[rank].activations == pytest.approx(4 * layer * peak)
        kept = 2 + 4 * deferred * linear_inputs
        assert rank_memories(offloaded)[rank].activations == pytest.approx(kept * layer)
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
    assert state == pytest.approx(bytes_of(dp) * rank_parameters(run, 0))


def test_zero_2_keeps_the_gradient_of_a_tied_embedding_full() -> None:
    run = run_of(replace(GPT, params_dtype="bf16"), 1, 4)
    parallel = replace(run.config.parallel, zero_stage=2)
    cluster = replace(run.cluster, world_size=8)
    run = replace(run, config=replace(run.config, parallel=parallel), cluster=cluster)
    table = GPT.vocab_size * GPT.hidden_size
    for rank, full in enumerate((table, 0, 0, table)):
        expected = 4 * (full + (rank_parameters(run, rank) - full) / 2)
        assert rank_memories(run)[rank].gradients == pytest.approx(expected)


def test_the_first_stage_holds_the_most_microbatches() -> None:
    memories = rank_memories(run_of(GPT, 1, 4))
    activations = [memory.activations for memory in memories]
    assert activations == [pytest.approx(activations[-1] * in_flight) for in_flight in (4, 3, 2, 1)]
    assert [memory.logits > 0 for memory in memories] == [False, False, False, True]


def test_the_loss_holds_copies_of_the_logits() -> None:
    run = run_of(replace(GPT, params_dtype="bf16"), 1, 1)
    logits = []
    for size in (0, 4, 8):
        program = Program(fused_attention=False, logit_copy_bytes=size)
        logits.append(rank_memories(replace(run, program=program))[0].logits)
    assert logits == [pytest.approx(logits[0] * factor) for factor in (1, 3, 5)]


@pytest.mark.parametrize(("dtype", "dp", "expected"), [("fp16", 2, 6), ("bf16", 2, 10), ("bf16", 1, 6)])
def test_buckets_are_no_larger_than_the_gradients(dtype: str, dp: int, expected: int) -> None:
    """Check DeepSpeed's three buckets, and one more of fp32 sums with weights in bf16."""
    program = in_dtype(PROGRAMS["megatron-deepspeed"], dtype)
    run = run_of(replace(GPT, params_dtype=dtype), 1, 1)
    run = replace(run, cluster=replace(run.cluster, world_size=dp))
    no_buffers = replace(program, buffer_bytes=0.0, sum_buffer_bytes=0.0)
    with_buffers, without = (
        rank_memories(replace(run, program=each))[0].workspace for each in (program, no_buffers)
    )
    assert with_buffers - without == pytest.approx(expected * rank_parameters(run, 0))


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
