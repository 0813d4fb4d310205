"""Measurement of this machine: the result is a type of GPU that plans can use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from megalite.plan.calibrate import measured_gpu
from megalite.plan.plan_options import read_calibration
from megalite.plan.plan_report import answer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_figure_is_measured(dtype: str) -> None:
    gpu = measured_gpu(dtype, is_quick=True)
    assert all(value > 0 for value in asdict(gpu).values())
    assert gpu.product_share == gpu.memory_share == gpu.link_share == 1.0


@pytest.mark.slow
def test_a_plan_with_them_and_their_file(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    words = f"--calibrate --calibration {file} --preset gpt2-124m --global-batch-size 8 --train-iters 10"
    text = "\n".join(answer(words.split()))
    assert "\nevery " in text
    assert "whole run" in text
    assert read_calibration(str(file)).gpus_per_node >= 1
