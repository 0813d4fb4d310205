"""Hold the division of a global batch's tokens among the experts of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerLoads:
    """Tokens of one layer's experts.

    Attributes:
        tokens: number of tokens that selected each expert.
        entropy: mean over the tokens of the entropy of the router's probabilities, in nats.
        dropped: number of these choices that were dropped because the expert was at capacity.
    """

    tokens: tuple[int, ...]
    entropy: float
    dropped: int = 0

    @property
    def max_violation(self) -> float:
        """Return by which share the largest load is above the mean (Wang et al. 2024, MaxVio)."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens)) - 1.0

    @property
    def figures(self) -> dict[str, float]:
        """Return the layer's figures by their names in logs."""
        return {"max_violation": self.max_violation, "entropy": self.entropy, "dropped": self.dropped}


@dataclass(frozen=True)
class ExpertUse:
    """Loads of all layers with experts in one iteration.

    Attributes:
        layers: by the layer's name, such as ``layers.3``.
    """

    iteration: int
    consumed_samples: int
    layers: Mapping[str, LayerLoads]

    def record(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "layers": {
                name: {"tokens": list(each.tokens), **each.figures} for name, each in self.layers.items()
            },
        }


def loads_in(record: object) -> Mapping[str, LayerLoads] | None:
    """Return the loads of layers in the object of a metrics file; None if it is not complete."""
    layers = record.get("layers") if isinstance(record, dict) else None
    if not isinstance(layers, dict) or not layers:
        return None
    try:
        return {str(name): _layer_in(each) for name, each in layers.items()}
    except (KeyError, TypeError, ValueError):
        return None


def _layer_in(record: Mapping[str, Any]) -> LayerLoads:
    """Return the loads of one layer.

    Raises:
        KeyError, TypeError, ValueError: it is not complete.
    """
    tokens = record["tokens"]
    if not isinstance(tokens, list) or not tokens or not all(type(count) is int for count in tokens):
        raise ValueError("tokens are a list of whole numbers")
    return LayerLoads(tuple(tokens), float(record["entropy"]), int(record.get("dropped", 0)))
