"""What training programs do differently, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import ModelConfig


@dataclass(frozen=True)
class Program:
    """A training program, as far as a plan depends on it; the defaults are this one.

    Attributes:
        fused_attention: the attention product keeps no scores in memory.
        fused_passes: norms, activations and sums of a layer run as few kernels.
        tp_share: of the tensor-parallel communication that is not hidden under products cut into pieces.
        gradient_bytes: of a gradient that is kept between microbatches, where weights have 16 bits.
        shared_copy_bytes: of a copy of it that is shared out with the optimizer's state.
        keeps_gathered: with sequence parallelism, a product's gathered input is kept for backward.
        buffer_bytes: that communication has for itself.
    """

    fused_attention: bool
    fused_passes: bool = False
    tp_share: float = 1.0
    gradient_bytes: int = 4
    shared_copy_bytes: int = 0
    keeps_gathered: bool = False
    buffer_bytes: float = 0.0


def own_program(model: ModelConfig) -> Program:
    """This one: dropout on the attention weights has its product written out."""
    return Program(fused_attention=model.attention_dropout == 0.0)
