"""Measurement of this machine: the result is a type of GPU that plans can use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megalite.plan.calibrate import measured_gpu
from megalite.plan.plan_options import read_calibration
from megalite.plan.plan_report import answer
from megalite.tensor_parallel.fp8 import has_gemms_in_8_bits
from megalite.utils.hardware.gpus import CPU_CORE


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_every_figure_is_measured(dtype: str) -> None:
    gpu = measured_gpu(dtype, is_quick=True)
    is_cuda = torch.cuda.is_available()
    # Which kernels run, and what a single GPU does not show.
    kinds = {"has_cudnn_attention", "has_triton", "has_mxfp4_alone", "nvlink_gpus", "fp8_share", "fp4_share"}
    absent = {name for name, value in asdict(gpu).items() if name not in kinds and not value > 0}
    has_8_bits = has_gemms_in_8_bits(torch.device("cuda" if is_cuda else "cpu"))
    assert absent == ({"fp4_tflops"} if has_8_bits else {"fp4_tflops", "fp8_tflops"})
    assert is_cuda or gpu.has_triton == CPU_CORE.has_triton
    assert gpu.product_share == gpu.memory_share == gpu.link_share == 1.0


@pytest.mark.slow
def test_a_plan_with_them_and_their_file(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    words = f"--calibrate --calibration {file} --preset gpt2-124m --global-batch-size 8 --train-iters 10"
    text = "\n".join(answer(words.split()))
    assert "\nevery " in text
    assert "whole run" in text
    assert read_calibration(str(file)).gpus_per_node >= 1
