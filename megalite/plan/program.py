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
        cudnn_attention: fused attention is cuDNN's, not FlashAttention-2's.
        keeps_scores: backward has the softmax's output, and that of its dropout.
        fused_passes: norms, activations and sums of a layer run as few kernels.
        tp_share: of the tensor-parallel communication that is not hidden under products cut into pieces.
        tp_hidden_share: share of the tensor-parallel communication in backward that runs under the
            product of the weight's gradient. Megatron-LM overlaps them since the end of 2021.
        fused_accumulation: the product that makes a weight's gradient adds it to its fp32 sum, and hides
            what that moves. It has no effect with ZeRO 3, where each gradient leaves at once.
        gradient_bytes: of a gradient that is kept between microbatches, where weights have 16 bits.
        shared_copy_bytes: of a copy of it that is shared out with the optimizer's state.
        keeps_gathered: with sequence parallelism, a product's gathered input is kept for backward.
        keeps_gate: SwiGLU keeps its gate's output beside both of its halves.
        logit_copy_bytes: bytes for each logit that the loss holds beside the 16-bit logits at its peak:
            4 for a copy in fp32, 8 for a copy and its softmax.
        buffer_bytes: the largest buffers for communication, three buckets of gradients. A bucket is never
            larger than the rank's gradients. DeepSpeed's have 5e8 elements.
        sum_buffer_bytes: the largest bucket of fp32 sums, flattened for the time that replicas add them up.
        splits_messages: each tensor-parallel rank sends its part of the hidden states to the next stage,
            which gathers them inside its node (Narayanan et al. 2021, section 4.1).
        one_adapter: collectives over nodes get the rate of one network adapter of each node.
        copies_slices: with ZeRO 1, the host copies gathered weights into the parameters in slices: one of
            each parameter for each replica (nanotron, distributed.py, all_gather_coalesced).
    """

    fused_attention: bool
    cudnn_attention: bool = False
    keeps_scores: bool = False
    fused_passes: bool = False
    tp_share: float = 1.0
    tp_hidden_share: float = 0.5
    fused_accumulation: bool = False
    gradient_bytes: int = 4
    shared_copy_bytes: int = 0
    keeps_gathered: bool = False
    keeps_gate: bool = False
    logit_copy_bytes: int = 0
    buffer_bytes: float = 0.0
    sum_buffer_bytes: float = 0.0
    splits_messages: bool = False
    one_adapter: bool = False
    copies_slices: bool = False


def own_program(model: ModelConfig) -> Program:
    """This one: dropout on the attention weights has its product written out, block by block."""
    return Program(fused_attention=model.attention_dropout == 0.0, fused_accumulation=True)


OWN = "megalite"
_MEGATRON = Program(
    fused_attention=False,
    keeps_scores=True,
    fused_passes=True,
    tp_hidden_share=0.0,
    logit_copy_bytes=8,
    splits_messages=True,
)
PROGRAMS: Mapping[str, Program] = {
    "megatron-2021": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, gradient_bytes=2, shared_copy_bytes=4, buffer_bytes=3e9),
    "megatron-core": Program(
        fused_attention=True,
        cudnn_attention=True,
        fused_passes=True,
        tp_share=0.4,
        fused_accumulation=True,
        gradient_bytes=2,
        logit_copy_bytes=4,
    ),
    "deepspeed-2021": replace(_MEGATRON, gradient_bytes=2, one_adapter=True),
    "plain-torch": Program(fused_attention=True, keeps_gate=True, logit_copy_bytes=4),
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
    """DeepSpeed keeps and sends fp32 sums beside gradients in bf16, but not beside those in fp16."""
    if program.shared_copy_bytes and params_dtype == "bf16":
        return replace(program, gradient_bytes=6, shared_copy_bytes=0, sum_buffer_bytes=2e9)
    return program
