"""Interleaved 1F1B: every rank holds several chunks of the model, so that the pipeline fills sooner."""

from __future__ import annotations

from itertools import pairwise

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.stages import StageMap


def interleaved(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """1F1B over groups of microbatches, each of which passes all chunks in turn (Narayanan et al. 2021).

    With v chunks the bubble is (p - 1) / (v m) of the work where m is a multiple of p. It needs p
    microbatches: fewer leave ranks waiting between two passes of a group.

    Args:
        rank: along the axis.
        stages: two or more chunks a rank.
        num_microbatches: m; where p does not divide it, groups are larger than p by one or more.
    """
    groups = _groups(num_microbatches, stages.num_ranks)
    forwards = interleaved_forward(rank, stages, num_microbatches)
    backwards = _passes(Kind.BACKWARD, groups, range(stages.num_chunks - 1, -1, -1))
    # The first group has reached the last chunk, and its first microbatch the last rank and come back here.
    ahead = (stages.num_chunks - 1) * len(groups[0]) + 2 * (stages.num_ranks - rank - 1)
    num_warmup = min(ahead, len(forwards))
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - num_warmup :]


def interleaved_forward(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """The forwards of `interleaved` alone, on every rank alike."""
    return _passes(Kind.FORWARD, _groups(num_microbatches, stages.num_ranks), range(stages.num_chunks))


def _groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Runs of p microbatches or a few more, the larger ones first, so that no later one is kept waiting.

    A group as long as the pipeline is back at rank 0 just as that has fed it in.
    """
    num_groups = max(num_microbatches // num_ranks, 1)
    size, more = divmod(num_microbatches, num_groups)
    starts = [group * size + min(group, more) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _passes(kind: Kind, groups: list[range], chunks: range) -> list[Action]:
    return [Action(kind, number, chunk) for group in groups for chunk in chunks for number in group]
