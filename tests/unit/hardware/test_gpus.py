"""Test the table of peaks."""

from __future__ import annotations

import pytest
import torch

from megalite.hardware.gpus import peak_tflops, peak_tflops_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_goes_by_whole_words_of_the_name(name: str, peak: float | None) -> None:
    assert peak_tflops_of(name) == peak


def test_a_cpu_has_no_peak() -> None:
    assert peak_tflops(torch.device("cpu")) is None
