"""GPU data sheets: rates for the planner, peaks for MFU.

This module imports only `megalite.errors`, so that every level can import it; only `peak_tflops` needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megalite.errors import UserError

if TYPE_CHECKING:
    import torch

_GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """Holds the rates per second of a type of GPU and of the links of its usual server.

    The first eight figures are from the vendor. The others are the shares that a good program reaches.

    Attributes:
        tflops: dense 16-bit TFLOP/s in the data sheet.
        memory_gib: memory that the driver reports.
        memory_gbps: memory bandwidth in GB/s.
        num_sms: streaming multiprocessors, over which the tiles of a GEMM are distributed.
        node_gbps: GB/s to the other GPUs of a node, one way.
        network_gbps: GB/s to other nodes, one way: the GPU's share of the node's adapters.
        gpus_per_node: GPUs in the usual server.
        host_link_bandwidth: bytes per second between GPU and host memory, one way; for offloading. It is half
            of the rate for both ways in NVIDIA's data sheets: 32 GB/s for PCIe x16 of generation 3 (V100), 64
            for 4 (A100), 128 for 5 (H100, H200), and 900 for NVLink-C2C (GH200; 450 per direction, Grace
            Hopper Superchip Architecture white paper). A B200 has PCIe 6, but the processors of its usual
            server have 5 (DGX B200 user guide). This is the rate of a single GPU. GPUs behind one PCIe
            switch, such as pairs in a usual A100 server, share its link to the host.
        product_share: share of `tflops` that a large GEMM reaches once a run has warmed the GPU up.
        attention_share: share of `tflops` that fused attention reaches.
        memory_share: share of `memory_gbps` that a memory-bound kernel reaches on a large tensor.
        link_share: share of a link that a collective of long messages reaches: 235 of 300 GB/s between 8
            A100 and 366 of 450 GB/s in a ring of 8 H200 (stas00/ml-engineering, network/README.md). It is
            also assumed for `host_link_bandwidth` with pinned memory.
        has_triton: whether it can run Triton kernels, which need compute capability 8.0.
        residual_gb: memory of a process outside of tensors: CUDA context, workspaces of libraries, buffers of
            communicators.
    """

    tflops: float
    memory_gib: float
    memory_gbps: float
    num_sms: int
    node_gbps: float
    network_gbps: float
    gpus_per_node: int
    host_link_bandwidth: float
    product_share: float
    attention_share: float
    memory_share: float = 0.80
    link_share: float = 0.8
    has_triton: bool = True
    residual_gb: float = 2.2

    @property
    def memory_bytes(self) -> float:
        """Return the bytes that a process can use, without the driver's part."""
        return (self.memory_gib - 0.6) * _GIB


_V100 = Gpu(125, 32, 900, 80, 150, 6.25, 8, 16e9, product_share=0.82, attention_share=0.31, has_triton=False)
_A100 = Gpu(312, 80, 2039, 108, 300, 25, 8, 32e9, product_share=0.76, attention_share=0.56)
_H100 = Gpu(989.4, 80, 3350, 132, 450, 50, 8, 64e9, product_share=0.74, attention_share=0.33)

GPUS: Mapping[str, Gpu] = {
    "v100-16": replace(_V100, memory_gib=16),
    "v100-32": _V100,
    "a100-40": replace(_A100, memory_gib=40, memory_gbps=1555),
    "a100-80": _A100,
    "a800-80": replace(_A100, node_gbps=200),
    "h100-80": _H100,
    "h800-80": replace(_H100, node_gbps=200),
    "h100-96-500w": replace(_H100, memory_gib=96, memory_gbps=2400, product_share=0.50),
    "h200": replace(_H100, memory_gib=141, memory_gbps=4800),
    "gh200-96": replace(_H100, memory_gib=96, memory_gbps=4000, gpus_per_node=1, host_link_bandwidth=450e9),
    "b200": Gpu(2250, 180, 8000, 148, 900, 50, 8, 64e9, product_share=0.70, attention_share=0.33),
}
"""GPUs by the name that ``--gpu`` accepts."""
ALIASES: Mapping[str, str] = {"v100": "v100-32", "a100": "a100-80", "h100": "h100-80"}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name, in any case.

    Raises:
        UserError: it is not in the table; the message lists the known names and how to add one.
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in GPUS:
        raise UserError(
            f"--gpu {name} is not known: choose one of {', '.join(GPUS)}; or choose the most similar one "
            "and change its figures, as in --gpu a100-80 --gpu-set tflops=400 memory_gib=96; to add it, "
            "write a row of GPUS in megalite/hardware/gpus.py"
        )
    return GPUS[key]


CPU_CORE = Gpu(
    0.2,
    memory_gib=16,
    memory_gbps=10,
    num_sms=1,
    node_gbps=1,
    network_gbps=1,
    gpus_per_node=1,
    host_link_bandwidth=5e9,
    product_share=1.0,
    attention_share=0.3,
    memory_share=1.0,
    link_share=1.0,
    has_triton=False,
    residual_gb=0.4,
)
"""One core of a usual server, as a GPU: for layouts of CPU ranks. --calibrate measures a machine instead."""

_NAMES: tuple[tuple[str, str], ...] = (
    ("GH200", "gh200-96"),
    ("H200", "h200"),
    ("B200", "b200"),
    ("GB200", "b200"),
    ("H100", "h100-80"),
    ("H800", "h800-80"),
    ("A100", "a100-80"),
    ("A800", "a800-80"),
    ("V100", "v100-32"),
)
"""Words in a device's name and its row of `GPUS`; the first match counts."""


def gpu_of_device(name: str) -> Gpu | None:
    """Return the row of a GPU by its name in CUDA; None for a GPU without a row."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    return next((GPUS[row] for word, row in _NAMES if word in words), None)


_HOPPER_PEAK = float(int(_H100.tflops))  # 989, from the product pages, as in other frameworks' MFU

_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", GPUS["b200"].tflops),
    ("GB200", 2500.0),
    ("B100", 1750.0),
    ("H200 NVL", 835.0),
    ("H200", _HOPPER_PEAK),
    ("GH200", _HOPPER_PEAK),
    ("H100 PCIE", 756.0),
    ("H100 NVL", 835.0),
    ("H100", _HOPPER_PEAK),
    ("H800", _HOPPER_PEAK),
    ("H20", 148.0),
    ("A100", _A100.tflops),
    ("A800", _A100.tflops),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("MI300X", 1307.0),
)
"""Words in a device's name and its dense bf16 TFLOP/s in the data sheet; the first match counts.

V100 is missing: it has no bf16.
"""


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak TFLOP/s for MFU; None for a CPU, a MIG slice or an unknown GPU."""
    if device.type != "cuda":
        return None
    import torch  # the planner reads this module without torch

    return peak_tflops_of(torch.cuda.get_device_name(device))


def peak_tflops_of(name: str) -> float | None:
    """Return the dense bf16 TFLOP/s of a GPU by its name in CUDA, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if "MIG" in words:
        return None
    return next((peak for key, peak in _PEAK_TFLOPS if words.issuperset(key.split())), None)
