"""GPU data sheets: rates for the planner, peaks for MFU.

This module imports `megalite.utils.errors` alone, so that every level can import it; only `peak_tflops`
and `device_name` need torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.utils.errors import UserError

if TYPE_CHECKING:
    import torch

_GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """Rates per second of a type of GPU and of the links of its usual server.

    The first eight figures are from the vendor. The others are the fractions that a good program reaches.

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
            Hopper Superchip Architecture white paper), which the two GPUs of a GB200 share. A B200 has PCIe
            6, but the processors of its usual server have 5 (DGX B200 user guide). This is the rate of a
            single GPU. GPUs behind one PCIe switch, such as pairs in a usual A100 server, share its link to
            the host.
        product_share: share of `tflops` that a large GEMM reaches once a run has warmed the GPU up.
        attention_share: share of `tflops` that fused attention reaches.
        memory_share: share of `memory_gbps` that a memory-bound kernel reaches on a large tensor.
        link_share: share of a link that a collective of long messages reaches: 235 of 300 GB/s between 8
            A100 and 366 of 450 GB/s in a ring of 8 H200 (stas00/ml-engineering, network/README.md). It is
            also assumed for `host_link_bandwidth` with pinned memory.
        nvlink_gpus: GPUs that NVLink connects if they are more than a node's.
        has_cudnn_attention: whether cuDNN's attention is faster on it than FlashAttention-2.
        has_triton: whether it can run Triton kernels, which need compute capability 8.0.
        residual_gb: memory of a process outside of tensors: CUDA context, workspaces of libraries, buffers of
            communicators.
        fp8_tflops, fp4_tflops: dense TFLOP/s of GEMMs in 8 and 4 bits in the data sheet; 0 if there are none.
            Alone, a large GEMM reaches as large a share of them as of `tflops`: the fastest in 8 bits has 71%
            of the peak of an H100, 76% of a B200's, 75% of a B300's and 72% of a GB200's
            (stas00/ml-engineering, compute/accelerator/README.md).
        fp8_share, fp4_share: shares of these that a large GEMM reaches in a run; 0 for `product_share`. GEMMs
            in few bits draw the most power, and at its limit (1000 W of a B200, 1200 W of a GB200, 1400 W of
            a GB300) a GPU lowers its clock. Chosen with the open half of benchmarks/published_rows.csv.
        has_mxfp4_alone: whether its GEMMs in 4 bits have MXFP4's scales, of 32 elements, and not NVFP4's.
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
    nvlink_gpus: int = 0
    has_cudnn_attention: bool = False
    has_triton: bool = True
    residual_gb: float = 2.2
    fp8_tflops: float = 0.0
    fp4_tflops: float = 0.0
    fp8_share: float = 0.0
    fp4_share: float = 0.0
    has_mxfp4_alone: bool = False

    @property
    def memory_bytes(self) -> float:
        """Return the bytes that a process can use, without the driver's part."""
        return (self.memory_gib - 0.6) * _GIB


_V100 = Gpu(125, 32, 900, 80, 150, 6.25, 8, 16e9, product_share=0.82, attention_share=0.31, has_triton=False)
_A100 = Gpu(312, 80, 2039, 108, 300, 25, 8, 32e9, product_share=0.76, attention_share=0.56)
_H100 = Gpu(
    *(989.4, 80, 3350, 132, 450, 50, 8, 64e9),
    product_share=0.74,
    attention_share=0.33,
    has_cudnn_attention=True,
    fp8_tflops=1978.9,
)
_B200 = replace(
    _H100,
    tflops=2250,
    memory_gib=180,
    memory_gbps=8000,
    num_sms=148,
    node_gbps=900,
    product_share=0.70,
    fp8_tflops=4500,
    fp4_tflops=9000,
    fp8_share=0.55,
    fp4_share=0.41,
)
_MI300X = Gpu(
    *(1307.4, 192, 5300, 304, 448, 50, 8, 64e9),
    product_share=0.46,
    attention_share=0.25,
    link_share=0.70,
    fp8_tflops=2614.9,
)
_GB200 = replace(
    _B200,
    tflops=2500,
    memory_gib=185,
    num_sms=152,
    gpus_per_node=4,
    nvlink_gpus=72,
    host_link_bandwidth=225e9,
    product_share=0.66,
    attention_share=0.31,
    fp8_tflops=5000,
    fp4_tflops=10000,
    fp8_share=0.52,
)

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
    "b200": _B200,
    # DGX B300 data sheet: a B200 with 288 GB and 800 Gb/s of network per GPU. The driver reports 275,040
    # MiB. Its fastest GEMM is a B200's (1769 and 1745 TFLOP/s: stas00/ml-engineering,
    # compute/accelerator/README.md). HGX B300 data sheet: 108 dense PFLOPS in 4 bits on 8 GPUs.
    "b300": replace(
        _B200, memory_gib=268, network_gbps=100, fp4_tflops=13500, fp8_share=0.70, fp4_share=0.51
    ),
    # GB200 NVL72 data sheet. The driver reports 189,471 MiB and 152 multiprocessors. The node is a tray
    # with 4 GPUs and 400 Gb/s of network each, and NVLink reaches all 72 GPUs of a rack. The fastest
    # GEMM has 73% of the peak, and a B200's 78% (the same source): both shares are smaller by this.
    "gb200": _GB200,
    # GB300 NVL72 data sheet: a GB200 with 279 GB (a driver reports as many GiB as the data sheets of B200 and
    # GB200 have GB), 1.5 times the rate in 4 bits, and 800 Gb/s of network per GPU.
    "gb300": replace(
        _GB200, memory_gib=278, network_gbps=100, fp4_tflops=15000, fp8_share=0.66, fp4_share=0.46
    ),
    # L40S data sheet. It has no NVLink: messages take PCIe 4. ECC uses 3 of its 48 GB. The network is that
    # of 8 GPUs in AWS's g6e.48xlarge, 400 Gb/s. The shares are an A100's: no measurement was found.
    "l40s": replace(
        _A100,
        tflops=362.05,
        memory_gib=45,
        memory_gbps=864,
        num_sms=142,
        node_gbps=32,
        network_gbps=6.25,
        fp8_tflops=733,
    ),
    # NVIDIA Ada GPU Architecture white paper; bf16 GEMMs sum in fp32, at half of the rate of sums in fp16.
    # Messages take PCIe 4: 25.9 GB/s with peer access (tinygrad/open-gpu-kernel-modules, issue 36), which
    # NVIDIA's driver refuses, so they take host memory too. The network is 100 Gb/s of Ethernet for 8 GPUs.
    # The fastest GEMM has 179 TFLOP/s (xzwgit/gpu-flops-bench), of which a run gets 0.8. Attention is an
    # A100's.
    "rtx4090": replace(
        _A100,
        tflops=165.2,
        memory_gib=24,
        memory_gbps=1008,
        num_sms=128,
        node_gbps=32,
        network_gbps=1.5625,
        product_share=0.87,
        fp8_tflops=330.3,
    ),
    # MI300X data sheet. A compute unit counts as a multiprocessor. 7 links of 64 GB/s go to the other GPUs
    # of the node, one to each; the planner does not know that 2 GPUs share only one. 8 GPUs reach 313 of
    # 448 GB/s (stas00/ml-engineering, network/README.md), and the fastest GEMM 668 TFLOP/s, of which a run
    # gets 0.9, as on a B200. Attention is FlashAttention-2's on an H100: no measurement of its backward was
    # found.
    "mi300x": _MI300X,
    # MI355X data sheet: 256 compute units, 288 GB, and 7 links of 76.5 GB/s, one way. AMD rounds the rates to
    # 2.5, 5 and 10.1 PFLOPS; these follow from 2.4 GHz and 1024 matrix cores (stas00/ml-engineering,
    # compute/accelerator/README.md). The fastest GEMM has 1565 TFLOP/s (the same source), of which a run gets
    # 0.9. Its instructions for 4 bits take scales in E8M0. The other shares are an MI300X's.
    "mi355x": replace(
        _MI300X,
        tflops=2516.6,
        memory_gib=288,
        memory_gbps=8000,
        num_sms=256,
        node_gbps=535.5,
        product_share=0.56,
        fp8_tflops=5033.2,
        fp4_tflops=10066.3,
        has_mxfp4_alone=True,
    ),
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
            "write a row of GPUS in megalite/utils/hardware/gpus.py"
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
    ("B300", "b300"),
    ("B200", "b200"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("H100", "h100-80"),
    ("H800", "h800-80"),
    ("A100", "a100-80"),
    ("A800", "a800-80"),
    ("V100", "v100-32"),
    ("L40S", "l40s"),
    ("4090", "rtx4090"),
    ("MI300X", "mi300x"),
    ("MI355X", "mi355x"),
)
"""Words in a device's name and its row of `GPUS`; the first match counts."""


def gpu_of_device(name: str) -> Gpu | None:
    """Return the row of a GPU by its name in CUDA; None for a GPU without a row."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    return next((GPUS[row] for word, row in _NAMES if word in words), None)


_HOPPER_PEAK = float(int(_H100.tflops))  # 989, from the product pages, as in other frameworks' MFU

_OTHER_PEAKS: tuple[tuple[str, float], ...] = (
    ("B100", 1750.0),
    ("H200 NVL", 835.0),
    ("H100 PCIE", 756.0),
    ("H100 NVL", 835.0),
    ("H20", 148.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40", 181.0),
    ("L4", 121.0),
)
"""Words in the name of a device without a row of its own, and its dense bf16 TFLOP/s in the data sheet."""


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak TFLOP/s for MFU; None for a CPU, a MIG slice or an unknown GPU."""
    if device.type != "cuda":
        return None
    import torch  # the planner reads this module without torch

    return peak_tflops_of(torch.cuda.get_device_name(device))


def peak_tflops_of(name: str) -> float | None:
    """Return the dense bf16 TFLOP/s of a GPU by its name in CUDA, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & {"MIG", "LAPTOP", "D"}:  # a part of a GPU, or a GeForce chip with fewer units
        return None
    for key, peak in _OTHER_PEAKS:
        if words.issuperset(key.split()):
            return peak
    gpu = gpu_of_device(name)
    if gpu is None or not gpu.has_triton:  # a V100 has no bf16
        return None
    return _HOPPER_PEAK if gpu.tflops == _H100.tflops else gpu.tflops


def device_name(device: torch.device) -> str:
    """Return the name of a GPU from its driver, or the name of the CPU from Linux."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
