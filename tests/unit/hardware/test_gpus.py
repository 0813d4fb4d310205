"""Test the table of peaks."""

from __future__ import annotations

import re

import pytest
import torch

from docs.make.blocks import ROOT
from megalite.hardware.gpus import GPUS, peak_tflops, peak_tflops_of


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
