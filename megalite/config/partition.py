"""Consecutive layers to stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def even_partition(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The same number of layers on every stage, or one more on the first ones: the last one has the loss."""
    fewest, more = divmod(num_layers, num_stages)
    return tuple(fewest + (stage < more) for stage in range(num_stages))


def balanced_partition(
    weights: Sequence[int], num_stages: int, before: int = 0, after: int = 0
) -> tuple[int, ...]:
    """Layers of each stage so that the heaviest stage is as light as can be, and the others alike.

    Args:
        weights: of each layer.
        num_stages: each gets a layer at least, of which there are enough.
        before: weight on the first stage beside its layers.
        after: weight on the last stage beside its layers.
    """
    assert len(weights) >= num_stages > 0
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(stage: int, start: int) -> tuple[tuple[int, int], int]:
        """For the stages from `stage` on: (heaviest, sum of squares), and where the first of them ends."""
        extra = before if stage == 0 else 0
        if stage == num_stages - 1:
            own = sums[-1] - sums[start] + after + extra
            return (own, own * own), len(weights)
        choices = []
        for end in range(start + 1, len(weights) - (num_stages - stage - 1) + 1):
            own = sums[end] - sums[start] + extra
            (heaviest, squares), _ = best(stage + 1, end)
            choices.append(((max(own, heaviest), own * own + squares), -end))
        cost, end = min(choices)  # of equals the one with more layers in front
        return cost, -end

    counts, start = [], 0
    for stage in range(num_stages):
        _, end = best(stage, start)
        counts.append(end - start)
        start = end
    return tuple(counts)
