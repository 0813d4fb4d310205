"""Planned recurrences: which kernels compute them, what they save, and how long they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config import Config, DataConfig, ModelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.observe.unit_record import RecurrenceCall
from megalite.plan.communication import Cluster
from megalite.plan.kernel_time import memory_bandwidth, recurrence_seconds
from megalite.plan.layer_time import phase_work
from megalite.plan.planned_run import PlannedRun, kernels_of
from megalite.utils.hardware.gpus import GPUS

GPU = GPUS["h100-80"]
DELTA_NET = {
    **{"recurrent_mixer": "gated_delta_net", "linear_key_head_dim": 64, "linear_value_head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "params_dtype": "bf16", "vocab_size": 256},
}
CALL = RecurrenceCall(256, 256, 4096, 128, 128, 64, 32, 2, is_delta=True, is_backward=False)


@pytest.mark.parametrize(
    ("gpu", "options", "expected"),
    [
        ("h100-80", {}, True),
        ("h100-80", {"params_dtype": "fp64"}, False),
        ("h100-80", {"linear_value_head_dim": 512}, False),
        ("h100-80", {"recurrent_mixer": "none"}, False),
        ("v100-32", {}, False),
    ],
)
def test_kernels_are_planned_where_they_run(gpu: str, options: dict[str, Any], expected: bool) -> None:
    model = replace(PRESETS["llama-tiny"], **DELTA_NET | options)
    assert kernels_of(Config(model=model), GPUS[gpu]).triton_recurrence == expected


def _run(model: ModelConfig, *, triton: bool) -> PlannedRun:
    config = Config(
        model=model,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1, micro_batch_size=3, global_batch_size=3),
    )
    gpu = replace(GPU, has_triton=triton)
    return PlannedRun(config, Cluster(gpu, 1, 1, GPU.node_gbps, GPU.network_gbps))


def test_kernels_save_their_inputs_instead_of_the_chunks() -> None:
    model = replace(PRESETS["llama-tiny"], **DELTA_NET, seq_length=256)
    plain, fused = (_run(model, triton=triton).units.layers[0] for triton in (False, True))
    assert not plain.forward.recurrences
    assert [each.is_backward for each in (*fused.forward.recurrences, *fused.backward.recurrences)] == [0, 1]
    assert fused.forward.recurrences[0].heads == 3 * 4
    saved = [
        {each.part: each.num_bytes for each in layer.saved}["gated_delta_net"] for layer in (plain, fused)
    ]
    # Two matrices of a chunk's pairs of tokens, in fp32, are among what plain PyTorch saves.
    assert saved[0] - saved[1] > 2 * 3 * 4 * 256 * 64 * 4


def test_kernels_take_the_time_of_their_products_or_of_memory() -> None:
    seconds, num_bytes = recurrence_seconds(GPU, CALL), sum(each.num_bytes for each in CALL.kernels)
    assert seconds > num_bytes / memory_bandwidth(GPU)
    slow = replace(GPU, memory_gbps=1e-9, memory_share=1.0)
    assert recurrence_seconds(slow, CALL) == pytest.approx(num_bytes)
    # A head on few multiprocessors takes more than its share of the time of many heads.
    few = CALL._replace(heads=4, key_heads=4)
    assert recurrence_seconds(GPU, few) > 2 * 4 / 256 * seconds
    assert recurrence_seconds(GPU, CALL._replace(is_backward=True)) > 1.5 * seconds


def test_a_layer_counts_the_time_of_its_recurrence() -> None:
    run = _run(replace(PRESETS["llama-tiny"], **DELTA_NET), triton=True)
    phase = run.units.layers[0].forward
    without = replace(phase, recurrences=())
    more = phase_work(run, phase, "forward").memory_bound - phase_work(run, without, "forward").memory_bound
    assert more == pytest.approx(recurrence_seconds(GPU, phase.recurrences[0]))
