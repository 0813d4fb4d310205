"""Adapt records of layers to Megatron-LM with Transformer Engine: rounding, rows of experts, the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import comb
from typing import NamedTuple

from megalite.config import ModelConfig
from megalite.observe.unit_record import PhaseRecord, UnitKey, UnitRecord
from megalite.plan.layer_time import OPERATOR_SECONDS


class Rounding(NamedTuple):
    """Kernels that round an operand of a layer's GEMMs to 8 or 4 bits, limited by memory bandwidth.

    Attributes:
        element_bytes: bytes per element of the operands.
        reads: how often an operand in 16 bits is read: to find its largest magnitude, and to round it.
        copies: copies that are written: GEMMs of inputs and of weight gradients may need different ones.
    """

    element_bytes: float
    reads: int
    copies: int

    def num_bytes(self, elements: float) -> float:
        """Return the bytes that rounding an operand reads and writes."""
        return elements * (2 * self.reads + self.element_bytes * self.copies)


ROUNDINGS: Mapping[str, Rounding] = {
    "delayed": Rounding(1, reads=1, copies=1),
    "delayed-hopper": Rounding(1, reads=1, copies=2),
    "tensorwise": Rounding(1, reads=2, copies=1),
    "tensorwise-hopper": Rounding(1, reads=2, copies=2),
    "blockwise": Rounding(1, reads=1, copies=2),
    "mxfp8": Rounding(1, reads=1, copies=2),
    "nvfp4": Rounding(0.5, reads=2, copies=2),
}
"""Transformer Engine's kernels by recipe. All GEMMs of a layer but the router's have rounded operands, also
those of weight gradients and experts; weights are rounded once per iteration. Delayed scaling knows its
scales before it reads the operands. A Hopper GPU multiplies in 8 bits only operands whose rows run along the
sum, so it transposes. Scales of blocks differ along rows and columns. NVFP4 has one more."""

ATTENTION_HOST, ROUTER_HOST, EXPERTS_HOST, EACH_EXPERT_HOST = 2.5e-3, 1.0e-3, 4.0e-3, 0.2e-3
"""Seconds of the host for forward and backward of a layer with experts: modules in Python, and for each
expert of a rank the calls that round and multiply. A CUDA graph of a part needs none. If the host is slower
than the GPU, the GPU waits: without graphs, such a layer took 9.6 ms with 8 experts of a rank on an H100, and
13.1 ms with 16 on a GB200, of which a graph of the iteration left 8.4 (Qwen3-30B in Megatron-Bridge 26.04 and
26.06, 4,096 and 16,384 tokens). Chosen with these runs and with those of other models that launch as much."""
GRACE_SLOWDOWN = 1.3
"""Host time on a Grace processor, relative to those of DGX H100, B200 and B300."""
FORWARD_HOST_SHARE = 0.4


class ExpertHost(NamedTuple):
    """Seconds of the host for a layer with experts and for each expert of a rank, forward and backward."""

    layer: float
    expert: float


class ExpertPasses(NamedTuple):
    """Reads and writes of the rows of gated experts outside of GEMMs, for one forward or backward.

    Attributes:
        hidden: of rows of the hidden size: to bring them into the order of the experts, and back.
        unsent: the same, of rows that a rank gets once, however many of its experts they have.
        forward, backward: of rows of the experts' size, by the activation function.
    """

    hidden: float
    unsent: float
    forward: float
    backward: float


OWN_PASSES: Mapping[str, ExpertPasses] = {
    "swiglu": ExpertPasses(6, 0, 5, 14),
    "squared_relu": ExpertPasses(6, 0, 6, 20),
    "quick_geglu": ExpertPasses(8, 0, 24, 57),
}
"""megalite's by activation function, in its records: slopes of their bytes in rows and in the experts' size.
Those with clamps, and the products with the router's weights, are several kernels."""
SORTED = ExpertPasses(6, 0, 3, 5)
"""Rows are sorted before and after an all-to-all, both ways. The activation and the router's weights are one
kernel, which reads two halves and writes their product."""
PERMUTED_ONCE = ExpertPasses(2, 2, 3, 5)
"""DeepEP and HybridEP send a row once, and then copy it to the rank's experts, and add their results up."""
FUSED_EXPERTS = PERMUTED_ONCE._replace(forward=0, backward=2)
"""The activation and its rounding are in the GEMMs, of which backward reads the first one's output."""


def with_host(layer: UnitRecord, host: ExpertHost) -> UnitRecord:
    """Return the record of a layer with the host's time for its experts, if it has some."""
    num_experts = next((gemm.batch for gemm in layer.forward.gemms if gemm.batch > 1), 0)
    if num_experts == 0:
        return layer
    num_operators = (host.layer + host.expert * num_experts) / OPERATOR_SECONDS
    shares = FORWARD_HOST_SHARE, 1 - FORWARD_HOST_SHARE
    forward, backward = (
        replace(phase, num_operators=round(share * num_operators))
        for phase, share in zip((layer.forward, layer.backward), shares, strict=True)
    )
    return replace(layer, forward=forward, backward=backward)


def with_passes(layer: UnitRecord, key: UnitKey, passes: ExpertPasses) -> UnitRecord:
    """Return the record of a layer with another program's passes over the rows of its experts."""
    grouped = [gemm for gemm in layer.forward.gemms if gemm.batch > 1]
    own = OWN_PASSES.get(key.model.activation)
    if not grouped or own is None:
        return layer
    first, last = grouped[0], grouped[-1]
    row_bytes = 2 * first.m * first.batch
    unsent = passes.unsent * mean_holders(key.model, key.ep) / key.model.moe_router_topk
    hidden = row_bytes * first.k * (passes.hidden + unsent - own.hidden)
    ungated = 0 if key.model.is_gated else 1  # it has one half to read, and one gradient less to write

    def adapt(phase: PhaseRecord, inner: float) -> PhaseRecord:
        return replace(phase, kernel_bytes=phase.kernel_bytes + hidden + row_bytes * last.k * inner)

    return replace(
        layer,
        forward=adapt(layer.forward, max(0, passes.forward - ungated) - own.forward),
        backward=adapt(layer.backward, max(0, passes.backward - 2 * ungated) - own.backward),
    )


def mean_holders(model: ModelConfig, num_parts: int) -> float:
    """Return how many of equal parts of the experts have some of a token's, in the mean."""
    topk, num_experts = model.moe_router_topk, model.num_experts
    assert num_experts is not None
    others = num_experts - num_experts // num_parts
    return num_parts * (1 - comb(others, topk) / comb(num_experts, topk))


def rounded(layer: UnitRecord, rounding: Rounding) -> UnitRecord:
    """Return the record of a layer with rounded operands: inputs in forward, gradients in backward."""
    gemms = [gemm for gemm in layer.forward.gemms if gemm.element_bytes == 2]
    inputs = sum(gemm.m * gemm.k * gemm.batch for gemm in gemms)
    outputs = sum(gemm.m * gemm.n * gemm.batch for gemm in gemms)

    def rounds(phase: PhaseRecord, elements: float) -> PhaseRecord:
        narrow = tuple(
            gemm._replace(element_bytes=rounding.element_bytes) if gemm.element_bytes == 2 else gemm
            for gemm in phase.gemms
        )
        return replace(phase, gemms=narrow, kernel_bytes=phase.kernel_bytes + rounding.num_bytes(elements))

    return replace(
        layer,
        forward=rounds(layer.forward, inputs),
        backward=rounds(layer.backward, outputs),
        weight=rounds(layer.weight, 0),
    )
