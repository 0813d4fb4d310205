"""Which activations backward computes again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags

Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
Module = Literal["core_attn", "mlp", "mlp_act", "layernorm"]


@dataclass(frozen=True)
class RecomputeConfig:
    """Memory of activations against time in backward.

    The run is bitwise the same with any of it but the loss in chunks: the sum of a weight's gradient then has
    another order.
    """

    recompute_granularity: Granularity | None = field(
        default=None,
        metadata=flags(
            sets={
                "--recompute-activations": "selective",
                "--checkpoint-activations": "full",
                "--deepspeed-activation-checkpointing": "full",
            }
        ),
    )
    """Recompute whole layers (full) or parts of each (selective); by default nothing."""
    recompute_method: Method = "uniform"
    """Of full: every layer, in groups that keep their input (uniform), or only a stage's first (block)."""
    recompute_num_layers: int = field(default=1, metadata=flags("--checkpoint-num-layers"))
    """Of full: layers of a group (uniform), or layers that a stage recomputes (block)."""
    recompute_modules: tuple[Module, ...] = ("core_attn",)
    """Of selective: the attention product, the MLP with its norm, its activation (mlp_act), or the norms."""
    distribute_saved_activations: bool = field(default=False, metadata=flags("--partition-activations"))
    """Of full: keep a slice of each saved input on every tensor-parallel rank, and gather it in backward."""
    cross_entropy_chunks: int = 1
    """Compute the logits and the loss in this many parts, and again in backward: they never exist whole."""

    @property
    def modules(self) -> frozenset[Module]:
        """Parts of every layer that are recomputed; none where whole layers are, or nothing is."""
        return frozenset(self.recompute_modules if self.recompute_granularity == "selective" else ())

    def groups(self, num_layers: int) -> list[tuple[range, bool]]:
        """A stage's layers, by their place in it, in groups; each with whether it is recomputed as one."""
        if self.recompute_granularity != "full":
            return [(range(num_layers), False)]
        if self.recompute_method == "block":
            count = min(self.recompute_num_layers, num_layers)
            return [(range(i, i + 1), True) for i in range(count)] + [(range(count, num_layers), False)]
        step = self.recompute_num_layers
        return [(range(i, min(i + step, num_layers)), True) for i in range(0, num_layers, step)]
