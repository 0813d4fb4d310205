"""What training programs do differently, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalite.config import ModelConfig


@dataclass(frozen=True)
class Program:
    """A training program, as far as a plan depends on it; the defaults are this one.

    Attributes:
        fused_attention: the scores of the attention product never go through memory.
        keeps_scores: backward has the softmax's output, and that of its dropout.
        fused_passes: norms, activations and sums of a layer run as few kernels.
        tp_share: of the tensor-parallel communication that is not hidden under products cut into pieces.
        gradient_bytes: of a gradient that is kept between microbatches, where weights have 16 bits.
        shared_copy_bytes: of a copy of it that is shared out with the optimizer's state.
        keeps_gathered: with sequence parallelism, a product's gathered input is kept for backward.
        keeps_gate: SwiGLU keeps its gate's output beside both of its halves.
        copies_logits: the loss has a copy of the logits in fp32.
        buffer_bytes: that communication has for itself.
    """

    fused_attention: bool
    keeps_scores: bool = False
    fused_passes: bool = False
    tp_share: float = 1.0
    gradient_bytes: int = 4
    shared_copy_bytes: int = 0
    keeps_gathered: bool = False
    keeps_gate: bool = False
    copies_logits: bool = False
    buffer_bytes: float = 0.0


def own_program(model: ModelConfig) -> Program:
    """This one: dropout on the attention weights has its product written out, block by block."""
    return Program(fused_attention=model.attention_dropout == 0.0)


OWN = "megalite"
_MEGATRON = Program(fused_attention=False, keeps_scores=True, fused_passes=True, copies_logits=True)
PROGRAMS: Mapping[str, Program] = {
    "megatron-2021": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, gradient_bytes=2, shared_copy_bytes=4, buffer_bytes=3e9),
    "megatron-core": Program(
        fused_attention=True, fused_passes=True, tp_share=0.4, gradient_bytes=2, copies_logits=True
    ),
    "plain-torch": Program(fused_attention=True, keeps_gate=True, copies_logits=True),
}
"""Others: Megatron-LM before fused attention, BLOOM's fork of it on DeepSpeed, NVIDIA's of 2024, and those on
torch's own attention and sharding."""


def program_named(name: str, model: ModelConfig) -> Program:
    """The program of that name as it trains a model.

    Args:
        name: OWN or one of PROGRAMS.
    """
    return own_program(model) if name == OWN else in_dtype(PROGRAMS[name], model.params_dtype)


def in_dtype(program: Program, params_dtype: str) -> Program:
    """DeepSpeed keeps fp32 sums beside gradients in bf16, but not beside those in fp16."""
    if program.shared_copy_bytes and params_dtype == "bf16":
        return replace(program, gradient_bytes=6, shared_copy_bytes=0)
    return program
