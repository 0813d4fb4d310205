"""The rows of the roofline against the model's own counts."""

from __future__ import annotations

import pytest

from benchmarks.roofline import (
    BACKWARD_GEMMS,
    gpu_of_device,
    mfu,
    predicted_mfu,
    rows,
    step_seconds,
)
from megalite.config.presets import PRESETS
from megalite.hardware.gpus import GPUS
from megalite.plan.model_flops import flops_per_token

MODEL, H200 = PRESETS["gpt-1.3b"], GPUS["h200"]


def test_gemms_and_attention_are_those_of_the_model() -> None:
    """Attention's backward computes the scores again, which model FLOPs do not count."""
    table = list(rows(MODEL, 16, H200))
    flops = sum(row.count * row.flops for row in table if row.kind == "gemm")
    forward = sum(row.count * row.flops for row in table if row.name == "attention forward")
    backward = sum(row.count * row.flops for row in table if row.name == "attention backward")
    assert backward == pytest.approx(BACKWARD_GEMMS * forward)
    counted = flops + 3 * forward
    assert counted == pytest.approx(flops_per_token(MODEL, 1) * 16 * MODEL.seq_length)


def test_no_kernel_is_expected_to_be_faster_than_its_floor() -> None:
    for flash2 in (False, True):
        for row in rows(MODEL, 16, H200, flash2):
            assert 0 < row.floor <= row.expected, row


def test_the_step_is_the_sum_of_its_kinds() -> None:
    table = list(rows(MODEL, 8, H200))
    kinds = [step_seconds(table, kind) for kind in ("gemm", "attention", "memory")]
    assert sum(kinds) == pytest.approx(step_seconds(table))


def test_expectations_are_those_that_the_page_records() -> None:
    assert 100 * predicted_mfu(MODEL, 16, H200) == pytest.approx(59, abs=0.5)
    with_flash2 = list(rows(MODEL, 16, H200, flash2=True))
    assert 100 * mfu(MODEL, 16, H200, step_seconds(with_flash2)) == pytest.approx(56, abs=0.5)
    assert predicted_mfu(MODEL, 16, H200, 8) > predicted_mfu(MODEL, 16, H200)  # one update for eight


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, key: str | None) -> None:
    found = gpu_of_device(name)
    assert (found and found[0]) == key
