"""Which layers stand on which pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence


def layers_of_stages(
    num_layers: int, num_stages: int, explicit: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Gives each stage a run of consecutive layers.

    Args:
        num_layers: layers of the whole model.
        num_stages: pipeline-parallel size, which divides `num_layers` if there is no `explicit`.
        explicit: layers of each stage, which sum up to `num_layers`; the config's rules have seen to both.
    """
    counts = explicit or [num_layers // num_stages] * num_stages
    assert len(counts) == num_stages and sum(counts) == num_layers, (num_layers, num_stages, explicit)
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))
