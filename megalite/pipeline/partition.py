"""Which layers stand on which pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence


def layers_of_stages(num_layers: int, counts: Sequence[int]) -> tuple[range, ...]:
    """Gives each stage a run of consecutive layers.

    Args:
        num_layers: layers of the whole model.
        counts: layers of each global stage, which sum up to `num_layers`: the config's rules have seen to it.
    """
    assert sum(counts) == num_layers, (num_layers, counts)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))
