"""The time of tensor-parallel collectives that overlap with GEMMs, and when training overlaps by default."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from megalite.config import Config, ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.config.parallel import OVERLAP_CHUNKS
from megalite.plan.communication import CONTENTION, Cluster
from megalite.plan.kernel_time import gemm_seconds
from megalite.plan.layer_time import model_work, overlapped_seconds, recomputation
from megalite.plan.layer_time import tp_seconds as seconds_of_phase
from megalite.plan.planned_run import PlannedRun
from megalite.utils.hardware.gpus import GPUS

LLAMA = {"position_embedding_type": "rope", "activation": "swiglu", "add_bias_linear": False}
MODELS = {
    "gpt-1.3b": ModelConfig(hidden_size=2048, num_attention_heads=16),
    "llama-8b": ModelConfig(
        hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, **LLAMA
    ),
    "llama-70b": ModelConfig(
        hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8, **LLAMA
    ),
}


def run_of(model: str, tp: int, num_tokens: int, gpu: str = "h100-80", **parallel: object) -> PlannedRun:
    chip = GPUS[gpu]
    config = Config(
        model=replace(MODELS[model], vocab_size=50304, seq_length=num_tokens, params_dtype="bf16"),
        parallel=ParallelConfig(**{"tensor_model_parallel_size": tp, "sequence_parallel": True, **parallel}),
        training=TrainingConfig(train_iters=1, micro_batch_size=1, global_batch_size=64),
    )
    cluster = Cluster(chip, 64, 8, chip.node_gbps, chip.network_gbps)
    return PlannedRun(config, cluster)


class TpSeconds(NamedTuple):
    """Seconds of a layer's collectives that are not hidden, in the order in which they start."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: float


def tp_seconds(run: PlannedRun) -> TpSeconds:
    layer = run.units.layers[0]
    backward = zip(layer.backward.collectives, seconds_of_phase(run, layer.backward, "backward"), strict=True)
    return TpSeconds(
        tuple(seconds_of_phase(run, layer.forward, "forward")),
        tuple(seconds for each, seconds in backward if not each.is_hidden),
        sum(seconds_of_phase(run, layer.weight, "weight")),
    )


def test_two_machines_in_turn() -> None:
    """Four parts of 3 s on the GPU and 2 s on the link take 2 + 4 x 3 s. Of the 20 s, 6 overlap."""
    assert overlapped_seconds(12.0, 3.0, 2.0, 4) == 2.0 + CONTENTION * 6.0
    assert overlapped_seconds(12.0, 3.0, 5.0, 4) == 3.0 + 4 * 5.0 - 12.0 + CONTENTION * 9.0
    assert overlapped_seconds(12.0, 12.0, 5.0, 1) == 5.0
    assert overlapped_seconds(10.0, 3.0, 2.0, 4) == 4.0 + CONTENTION * 6.0  # smaller GEMMs take longer


def test_parts_overlap_in_forward() -> None:
    apart, parts = (
        tp_seconds(run_of("llama-70b", 8, 16384, tp_comm_overlap=is_on)) for is_on in (False, True)
    )
    assert sum(parts.forward) < 0.8 * sum(apart.forward)
    assert parts.backward_input == apart.backward_input


def test_without_sequence_parallelism_only_rows_have_sums_in_forward() -> None:
    apart, parts = (
        tp_seconds(run_of("llama-70b", 8, 16384, sequence_parallel=False, tp_comm_overlap=is_on))
        for is_on in (False, True)
    )
    assert len(apart.forward) == len(parts.forward) == 2
    assert 0.0 < parts.forward[0] < apart.forward[0]
    assert parts.backward_input == apart.backward_input  # the weight's gradient hides as much as before


def test_a_split_backward_exposes_the_sums_of_columns() -> None:
    pipeline = {"pipeline_model_parallel_size": 2, "tp_comm_overlap": True}
    usual, split = (
        tp_seconds(run_of("llama-70b", 8, 16384, pipeline_schedule=schedule, **pipeline))
        for schedule in ("1f1b", "zb-h1")
    )
    apart = tp_seconds(
        run_of("llama-70b", 8, 16384, pipeline_schedule="zb-h1", **{**pipeline, "tp_comm_overlap": False})
    )
    assert usual.forward == split.forward
    assert apart.backward_input == (apart.forward[0],) * 4  # the weight's gradient hides nothing
    assert (usual.backward_weight, split.backward_weight) == (0.0, 2 * apart.forward[0])
    assert split.backward_input[::2] == apart.backward_input[::2]
    assert sum(usual.backward_input) < sum(split.backward_input) < sum(apart.backward_input)


def test_symmetric_memory_hides_what_multiplies_as_long() -> None:
    run = run_of("llama-70b", 8, 8192, tp_comm_overlap_method="symmetric_memory")
    chunks, symmetric = tp_seconds(run_of("llama-70b", 8, 8192)), tp_seconds(run)
    assert sum(symmetric.forward) < sum(chunks.forward)
    assert sum(symmetric.backward_input) < sum(chunks.backward_input)
    slow = replace(run, cluster=replace(run.cluster, node_gbps=5.0))
    assert sum(tp_seconds(slow).forward) > 5 * sum(tp_seconds(run).forward)


@pytest.mark.parametrize("gpu", ["a100-80", "h100-80", "h200"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_training_overlaps_by_default_where_it_pays(sequence_parallel: bool, gpu: str) -> None:
    """Sum over models and sizes: a single GEMM may need one wave more in parts."""

    def seconds(num_tokens: int, **options: object) -> float:
        runs = (
            run_of(model, tp, num_tokens, gpu, sequence_parallel=sequence_parallel, **options)
            for model in MODELS
            for tp in (2, 4, 8)
        )
        return sum(sum(tp_seconds(run).forward) for run in runs)

    (many, four), (fewest, two) = OVERLAP_CHUNKS
    for num_tokens, num_chunks in ((fewest, two), (2 * fewest, two), (many, four), (2 * many, four)):
        assert seconds(num_tokens) == seconds(num_tokens, tp_comm_overlap_chunks=num_chunks)
        assert seconds(num_tokens) < seconds(num_tokens, tp_comm_overlap=False)
    assert seconds(many) < seconds(many, tp_comm_overlap_chunks=two)
    few = fewest // 4
    assert seconds(few) == seconds(few, tp_comm_overlap=False) < seconds(few, tp_comm_overlap=True)


def test_a_recomputed_group_ends_before_its_last_gemm() -> None:
    run = run_of("llama-70b", 8, 4096)
    recompute = RecomputeConfig(recompute_granularity="full", recompute_num_layers=2)
    run = replace(run, config=replace(run.config, recompute=recompute))
    work = model_work(run)
    layer, again = work.layers[0], recomputation(run, (0,) * 4, work)
    last = gemm_seconds(run.cluster.gpu, run.tokens, 8192, 28672 // 8)
    assert again.gemms == pytest.approx(4 * layer.forward.gemms - 2 * last)
    assert again.tp == pytest.approx(4 * layer.forward.tp - 2 * tp_seconds(run).forward[-1])
