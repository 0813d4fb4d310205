"""Test the table of peaks."""

from __future__ import annotations

import re

import pytest
import torch

from docs.make.blocks import ROOT
from megalite.utils.hardware.gpus import GPUS, gpu_of_device, peak_tflops, peak_tflops_of


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
        ("NVIDIA L40S", 362.05),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("AMD Instinct MI355X", 2516.6),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_goes_by_whole_words_of_the_name(name: str, peak: float | None) -> None:
    assert peak_tflops_of(name) == peak


@pytest.mark.parametrize("name", ["l40s", "rtx4090"])
def test_cards_without_nvlink_send_messages_over_pcie(name: str) -> None:
    assert GPUS[name].node_gbps * 1e9 == GPUS[name].host_link_bandwidth


def test_the_page_about_plans_lists_the_table() -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `--gpu` \| (.*?);", text, re.MULTILINE)
    assert re.findall(r"`(.*?)`", row) == list(GPUS)


def test_a_cpu_has_no_peak() -> None:
    assert peak_tflops(torch.device("cpu")) is None


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if gpu.fp8_tflops])
def test_peaks_of_fewer_bits_are_dense(name: str) -> None:
    """A data sheet often names rates with sparsity, which are twice as high."""
    gpu = GPUS[name]
    assert gpu.fp8_tflops / gpu.tflops == pytest.approx(2, rel=0.02)
    assert gpu.fp4_tflops / gpu.tflops in (0, pytest.approx(4, rel=0.01), pytest.approx(6, rel=0.01))


@pytest.mark.parametrize("device", ["NVIDIA GB300", "NVIDIA GB200", "AMD Instinct MI355X OAM"])
def test_a_device_has_its_row(device: str) -> None:
    gpu = gpu_of_device(device)
    assert gpu is not None
    assert gpu.tflops == peak_tflops_of(device)
    assert device.split()[1 if "AMD" not in device else 2].lower() in GPUS
