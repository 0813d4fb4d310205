"""Kinds of GPU, by their data sheets and by what programs get of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalite.errors import UserError

_GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and the links that its servers come with; rates in units a second.

    The first seven are the vendor's figures, the others what a good program gets of them.

    Attributes:
        tflops: dense 16-bit TFLOP/s of the data sheet, which MFU is a share of.
        memory_gib: what the driver calls its memory.
        memory_gbps: gigabytes to and from memory.
        num_sms: streaming multiprocessors, over which a product's tiles are dealt.
        node_gbps: gigabytes to the other GPUs of a node, one way.
        network_gbps: gigabytes to other nodes, one way: its share of the node's adapters.
        gpus_per_node: of the usual server.
        product_share: of `tflops`, that a large product of matrices gets while a run has warmed the GPU up.
        attention_share: of `tflops`, that the fused attention product gets.
        memory_share: of `memory_gbps`, that a pass over a large tensor gets.
        link_share: of both links, that a collective of long messages gets: 235 of 300 GB/s between 8 A100
            and 366 of 450 GB/s in a ring of 8 H200 (stas00/ml-engineering, network/README.md).
        residual_gb: of a process, that no tensor holds: the driver's context, the workspaces of libraries,
            the buffers of communicators.
    """

    tflops: float
    memory_gib: float
    memory_gbps: float
    num_sms: int
    node_gbps: float
    network_gbps: float
    gpus_per_node: int
    product_share: float
    attention_share: float
    memory_share: float = 0.80
    link_share: float = 0.8
    residual_gb: float = 2.2

    @property
    def memory_bytes(self) -> float:
        """Bytes that a process can have of it: a part is the driver's."""
        return (self.memory_gib - 0.6) * _GIB


_V100 = Gpu(125, 32, 900, 80, 150, 6.25, 8, product_share=0.82, attention_share=0.31)
_A100 = Gpu(312, 80, 2039, 108, 300, 25, 8, product_share=0.76, attention_share=0.56)
_H100 = Gpu(989.4, 80, 3350, 132, 450, 50, 8, product_share=0.74, attention_share=0.33)

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
    "b200": Gpu(2250, 180, 8000, 148, 900, 50, 8, product_share=0.70, attention_share=0.33),
}
"""By the name that ``--gpu`` takes."""
ALIASES: Mapping[str, str] = {"v100": "v100-32", "a100": "a100-80", "h100": "h100-80"}


def find_gpu(name: str) -> Gpu:
    """The kind of that name, whatever its case.

    Raises:
        UserError: nobody has added it; with those that there are, and how to add one.
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in GPUS:
        raise UserError(
            f"--gpu {name} is not known: choose one of {', '.join(GPUS)}; or start from the nearest "
            "of them and change its figures, as in --gpu a100-80 --gpu-set tflops=400 memory_gib=96; a row "
            "of GPUS in megalite/plan/gpu.py makes it known"
        )
    return GPUS[key]
