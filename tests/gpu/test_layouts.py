"""Rows of the layout table on GPUs, over NCCL, with attention in the Triton kernels.

The kernels have no fp64, so the bounds are those of fp32. The reference is one rank with unfused attention,
whose dropout masks are the same: each row also compares the kernels with the formula.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.kernels.flash_attention import has_triton
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord, record_run
from megalite.utils.hardware.process_settings import nccl_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]
NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 5, 8
LAYOUTS = (
    *("one rank", "mbs1", "mbs4", "tp1+selective", "tp2", "tp2+sp", "pp2", "dp2", "tp2pp2dp2+sp+zero1"),
    *("tp2+overlap", "tp2+sp+overlap"),
)
BACKEND, COMMUNICATION = "triton", "nccl"


def _config(model: str, backend: str) -> Config:
    """ALiBi and packed documents for BLOOM, grouped key/value heads for Llama, dropout for all."""
    packed = model == "bloom-tiny"
    return Config(
        model=replace(
            PRESETS[model],
            hidden_dropout=0.1,
            attention_dropout=0.1,
            attention_backend=backend,  # type: ignore[arg-type]
            vocab_size=512,
            params_dtype="fp32",
            seq_length=72,
        ),
        parallel=ParallelConfig(distributed_backend=COMMUNICATION),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True, reset_attention_mask=packed, reset_position_ids=packed),
        training=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=GLOBAL_BATCH_SIZE,
            train_iters=NUM_ITERATIONS,
            eval_iters=0,
        ),
    )


@functools.cache
def _reference(model: str) -> RunRecord:
    return record_run(_config(model, "unfused"), NUM_ITERATIONS, 1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["gpt-tiny", "bloom-tiny", "llama-tiny"])
def test_triton_attention_trains_the_same_run(model: str, name: str) -> None:
    layout = Layout() if name == "one rank" else Layout.parse(name)
    shares = torch.cuda.device_count() < layout.world_size
    if shares and (problem := nccl_problem()):
        pytest.skip(f"needs {layout.world_size} GPUs; {problem}")
    config = layout.apply(_config(model, BACKEND), GLOBAL_BATCH_SIZE)
    config = replace(config, parallel=replace(config.parallel, ranks_share_gpus=shares))
    run = record_run(config, NUM_ITERATIONS, layout.world_size)
    assert not compare(run, _reference(model)).excesses(TOLERANCES["fp32"])
