"""The parts that an iteration's time is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.plan.cluster import Cluster
from megalite.plan.communication import Group
from megalite.plan.gpu import GPUS
from megalite.plan.iteration import time_iteration
from megalite.plan.job import Job
from megalite.plan.pipeline import _stages, least_seconds, makespan
from megalite.plan.products import alignment_rate, product_seconds
from megalite.plan.program import Program

GPU = GPUS["a100-80"]
CLUSTER = Cluster(GPU, 64, 8, 300.0, 25.0)
MODEL = ModelConfig(
    num_layers=16, hidden_size=2048, num_attention_heads=16, vocab_size=51200, params_dtype="bf16"
)


def job_of(cluster: Cluster = CLUSTER, batch: int = 256, **parallel) -> Job:
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(train_iters=1, global_batch_size=batch),
    )
    return Job(config, cluster, Program(fused_attention=True))


def test_large_products_come_near_the_gpus_rate() -> None:
    size = 16384
    rate = 2 * size**3 / product_seconds(GPU, size, size, size) / 1e12
    assert 0.9 * GPU.product_share * GPU.tflops < rate <= GPU.product_share * GPU.tflops


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    rows = 128 * GPU.num_sms
    one, more = (product_seconds(GPU, m, 256, 8192) for m in (rows, rows + 128))
    assert more > 1.3 * one


def test_thin_products_are_bound_by_memory() -> None:
    moved = 2 * (8 * 8192 + 8192 * 8192 + 8 * 8192)
    assert product_seconds(GPU, 8, 8192, 8192) >= moved / (GPU.memory_gbps * 1e9)


def test_rows_that_start_anywhere_are_slow() -> None:
    assert alignment_rate(150) < alignment_rate(1800) < alignment_rate(1792) == 1.0


def test_rings_over_nodes_share_the_adapters() -> None:
    inside, rails, whole = (Group(CLUSTER, size, stride) for size, stride in ((8, 1), (8, 8), (64, 1)))
    assert inside.bytes_per_second > whole.bytes_per_second > rails.bytes_per_second
    assert whole.bytes_per_second == 8 * rails.bytes_per_second
    assert Group(CLUSTER, 1, 1).reduce_seconds(1e9) == 0.0
    assert inside.reduce_seconds(1e9) == pytest.approx(2 * inside.gather_seconds(1e9), rel=0.02)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_model_parallel_size": 4},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "gpipe"},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1"},
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-v"},
        {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_size": 8, "num_virtual_stages_per_pipeline_rank": 2},
    ],
)
def test_many_microbatches_cost_what_the_whole_simulation_says(parallel) -> None:
    job = job_of(replace(CLUSTER, world_size=8), batch=64, **parallel)
    stages = _stages(job)
    assert makespan(job, stages) == pytest.approx(makespan(job, stages, max_rounds=1000), rel=0.01)
    assert least_seconds(job) <= makespan(job, stages) * 1.001


def test_the_bubble_is_the_papers() -> None:
    job = job_of(replace(CLUSTER, world_size=4), batch=16, pipeline_model_parallel_size=4)
    alike = [{kind: work * 1.0 for kind, work in _stages(job)[1].items()}] * 4
    work = sum(each.seconds for each in alike[0].values()) * 16
    assert makespan(job, alike) / work - 1 == pytest.approx(3 / 16)


def test_choices_change_time_as_they_should() -> None:
    base = time_iteration(job_of()).seconds
    assert time_iteration(job_of(overlap_grad_reduce=False)).seconds > base
    assert time_iteration(job_of(replace(CLUSTER, network_gbps=2.0))).seconds > base
    assert time_iteration(job_of(zero_stage=3)).seconds > base
    assert time_iteration(job_of(tensor_model_parallel_size=8)).work.tp > 0
    written_out = replace(job_of(), program=Program(fused_attention=False))
    assert time_iteration(written_out).work.attention > time_iteration(job_of()).work.attention


def test_parts_and_bubble_make_up_the_iteration() -> None:
    time = time_iteration(job_of(pipeline_model_parallel_size=4, tensor_model_parallel_size=2))
    assert time.work.seconds + time.waiting == pytest.approx(time.seconds)
    assert 0 < time.bubble_fraction < 1
