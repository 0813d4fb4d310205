"""One transformer layer: norm before each block, the blocks' outputs added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.attention import Attention
from megalite.model.attention_core import Core
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.model.positions import Places
from megalite.parallel.recompute import compute, compute_between, recompute, recompute_between
from megalite.parallel.rng import Dropout
from megalite.parallel.shard import Placement


class TransformerLayer(nn.Module):
    """x + drop(attention(norm(x)) + bias), then x + drop(mlp(norm(x)) + bias).

    Both blocks leave the bias of their last product to the pass that drops and adds.

    Args:
        recomputed: parts of it that backward computes again, by their names in `RecomputeConfig`.
    """

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        core: Core,
        layer: int,
        seed: int,
        recomputed: Collection[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.place = place
        self.attention_norm = build_norm(config, place, with_residual=True)
        self.attention = Attention(config, place, core, layer, seed, recomputed)
        self.attention_dropout = Dropout(config.hidden_dropout, seed, f"layers.{layer}.attention.output")
        self.mlp_norm = build_norm(config, place, with_residual=True)
        self.mlp = MLP(config, place, recomputed)
        self.mlp_dropout = Dropout(config.hidden_dropout, seed, f"layers.{layer}.mlp.output")
        between = recompute_between if "layernorm" in recomputed else compute_between
        self.before_attention = between
        self.before_mlp, self.run = (between, compute)
        if "mlp" in recomputed:  # norm and all: what is recomputed as a whole holds no recomputed parts
            self.before_mlp, self.run = compute_between, recompute

    def forward(self, x: Tensor, sample_numbers: Tensor, places: Places) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``, both ``[s/t, b, h]`` if sequence parallel."""
        base = self.place.first_position(x.shape[0]) * x.shape[-1]
        attend = partial(self.attention, sample_numbers=sample_numbers, places=places)
        y, x = self.before_attention(self.attention_norm, x, past(attend))
        x = self.attention_dropout.add(y, self.attention.projection.bias, x, sample_numbers, base)
        y, x = self.run(self._mlp, x)
        return self.mlp_dropout.add(y, self.mlp.down.bias, x, sample_numbers, base)

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.before_mlp(self.mlp_norm, x, past(self.mlp))


def past(block: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """A block of the first of two tensors that leaves the second, the residual, as it is."""
    return lambda both: (block(both[0]), both[1])
