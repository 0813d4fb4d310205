"""Settings of Megatron-LM with Transformer Engine that megalite does not have, as another program's plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.other_programs import PROGRAMS, OtherProgram
from benchmarks.transformer_engine import (
    ATTENTION_HOST,
    EACH_EXPERT_HOST,
    EXPERTS_HOST,
    FUSED_EXPERTS,
    GRACE_SLOWDOWN,
    OWN_PASSES,
    PERMUTED_ONCE,
    ROUNDINGS,
    ROUTER_HOST,
    SORTED,
    ExpertHost,
    ExpertPasses,
    Rounding,
)
from megalite.utils.hardware.gpus import find_gpu

WHOLE = "full_iteration"
"""Scope of a CUDA graph of a whole iteration."""


@dataclass(frozen=True)
class MegatronSettings:
    """What Megatron-LM's flags change in its plan. The defaults are those of Megatron-Bridge's recipes.

    Attributes:
        gpu: name of the type of GPU.
        activation: of the experts; one with clamps is several kernels.
        recipe: how GEMMs round to 8 or 4 bits; None in 16 bits.
        graphs: parts of a layer that CUDA graphs launch, or `WHOLE`.
        sends_tokens_once: DeepEP or HybridEP sends the rows of experts.
        recomputes_expert_activation: backward computes the activation of experts again (`moe_act`).
        overlaps_tp: collectives of tensor parallelism overlap with parts of GEMMs.
        fuses_loss: the loss is Transformer Engine's.
        reduces_in_bf16: gradients are kept and reduced in 16 bits.
        gathers_rounded: ZeRO gathers weights in 8 bits.
    """

    gpu: str
    activation: str = "swiglu"
    recipe: str | None = None
    graphs: frozenset[str] = frozenset()
    sends_tokens_once: bool = False
    recomputes_expert_activation: bool = False
    overlaps_tp: bool = True
    fuses_loss: bool = True
    reduces_in_bf16: bool = True
    gathers_rounded: bool = True

    @property
    def program(self) -> OtherProgram:
        """Return the program with these settings."""
        base = PROGRAMS["megatron-bridge" if self.fuses_loss else "megatron-core"]
        return replace(
            base,
            tp_share=base.tp_share if self.overlaps_tp else 1.0,
            gradient_bytes=2 if self.reduces_in_bf16 else 4,
            gathers_rounded=self.gathers_rounded,
            sends_tokens_once=self.sends_tokens_once,
            expert_host=self._expert_host,
            expert_passes=self._expert_passes,
            rounding=self._rounding,
        )

    @property
    def _expert_host(self) -> ExpertHost:
        """Return the host's time for layers with experts, outside of CUDA graphs."""
        if WHOLE in self.graphs:
            return ExpertHost(0.0, 0.0)
        host = ATTENTION_HOST * ("attn" not in self.graphs) + ROUTER_HOST * ("moe_router" not in self.graphs)
        slowdown = GRACE_SLOWDOWN if self.gpu.startswith("gb") else 1.0
        return ExpertHost(slowdown * (host + EXPERTS_HOST), slowdown * EACH_EXPERT_HOST)

    @property
    def _expert_passes(self) -> ExpertPasses:
        """Return the reads and writes of the rows of experts."""
        fuses = self.recipe == "mxfp8" and WHOLE in self.graphs
        passes = FUSED_EXPERTS if fuses else PERMUTED_ONCE if self.sends_tokens_once else SORTED
        if self.activation == "quick_geglu" and not fuses:
            own = OWN_PASSES[self.activation]
            passes = passes._replace(forward=own.forward, backward=own.backward)
        if self.recomputes_expert_activation:
            passes = passes._replace(backward=passes.backward + passes.forward)
        return passes

    @property
    def _rounding(self) -> Rounding | None:
        """Return how Transformer Engine rounds; None in 16 bits."""
        is_hopper = find_gpu(self.gpu).fp4_tflops == 0
        of_hopper = ROUNDINGS.get(f"{self.recipe}-hopper") if is_hopper else None
        return of_hopper or ROUNDINGS.get(str(self.recipe))
