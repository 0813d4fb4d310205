"""Assign the documents of a packed sample to context-parallel ranks, with --dynamic-context-parallel.

Every rank gets as many tokens as the others, and attention within documents costs every rank about as many
pairs of a query and a key that it sees. A short document is assigned to one rank, whose queries then need no
keys of other ranks. A long one is cut over as few ranks as balance allows, in zigzag order: each has a part
from its front, and a part that is about as far from its end.

An assignment is a function of the documents' lengths, so the ranks need not communicate to agree on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

_LARGEST_EXCESS = 0.05
"""By how much the pairs of the busiest rank may exceed the mean before fewer documents stay whole."""


class DocumentRun(NamedTuple):
    """Consecutive positions of one document in a sample.

    Attributes:
        document: all positions of the document.
    """

    document: range
    positions: range

    @property
    def num_pairs(self) -> int:
        """Return how many pairs of a query at these positions and a key it sees, in causal attention."""
        first, last = (bound - self.document.start for bound in (self.positions.start, self.positions.stop))
        return (last * (last + 1) - first * (first + 1)) // 2


@dataclass(frozen=True, eq=False)
class Assignment:
    """Positions of one sample that each rank holds.

    Attributes:
        ranks: runs of each rank, in the order of its tokens.
    """

    ranks: tuple[tuple[DocumentRun, ...], ...]

    def positions_of(self, rank: int) -> list[int]:
        """Return the positions that a rank holds, in the order of its tokens."""
        return [position for run in self.ranks[rank] for position in run.positions]

    @property
    def num_pairs(self) -> list[int]:
        """Return how many pairs of a query and a key that it sees each rank computes."""
        return [sum(run.num_pairs for run in runs) for runs in self.ranks]

    @property
    def is_balanced(self) -> bool:
        """Return whether the busiest rank computes about as many pairs as the mean of the ranks."""
        pairs = self.num_pairs
        return max(pairs) * len(pairs) <= (1.0 + _LARGEST_EXCESS) * sum(pairs)


def assign_documents(lengths: Sequence[int], num_ranks: int) -> Assignment:
    """Assign the documents of one sample.

    A rank's part of a document has at first at most the tokens of a rank, then three quarters of that, and so
    on, until the ranks are balanced. With all documents cut over all ranks, they are, up to a token of each.

    Args:
        lengths: tokens of the documents, in their order; `num_ranks` divides their sum.
    """
    bounds = pairwise(accumulate(lengths, initial=0))
    documents = sorted((range(first, last) for first, last in bounds), key=len, reverse=True)
    num_tokens = sum(lengths) // num_ranks
    longest = min(num_tokens, len(documents[0]))
    while True:
        assignment = _assign(documents, num_ranks, num_tokens, longest)
        if longest == 0 or assignment.is_balanced:
            return assignment
        longest = 3 * longest // 4


def _assign(documents: Sequence[range], num_ranks: int, num_tokens: int, longest: int) -> Assignment:
    """Assign documents, the longest of which come first, to as few ranks as parts of `longest` tokens need.

    What does not fit is cut over all ranks, in proportion to the tokens that they still need.

    Args:
        num_tokens: tokens of each rank.
    """
    held: list[list[DocumentRun]] = [[] for _ in range(num_ranks)]
    needed, pairs, remaining = [num_tokens] * num_ranks, [0] * num_ranks, []

    def assign(document: range, counts: Sequence[int]) -> None:
        for rank, positions in _zigzag(document, counts):
            held[rank].append(run := DocumentRun(document, positions))
            needed[rank] -= len(positions)
            pairs[rank] += run.num_pairs

    for document in documents:
        chosen = _fewest_ranks(len(document), longest, needed, pairs)
        if chosen:
            assign(
                document, _in_proportion(len(document), [int(rank in chosen) for rank in range(num_ranks)])
            )
        else:
            remaining.append(document)
    for document in remaining:
        assign(document, _in_proportion(len(document), needed))
    return Assignment(tuple(tuple(sorted(runs, key=lambda run: run.positions.start)) for runs in held))


def _fewest_ranks(length: int, longest: int, needed: Sequence[int], pairs: Sequence[int]) -> list[int]:
    """Return ranks that need equal parts of a document, as few as possible; none if no number of ranks does.

    Of the ranks that need them, they are those with the fewest pairs.

    Args:
        longest: largest number of tokens of a part; 0 for no parts of equal length.
        needed: tokens that each rank still needs.
    """
    fewest = -(-length // longest) if longest else len(needed) + 1
    for size in range(fewest, len(needed) + 1):
        fitting = [rank for rank, left in enumerate(needed) if left >= -(-length // size)]
        if len(fitting) >= size:
            return sorted(fitting, key=pairs.__getitem__)[:size]
    return []


def _in_proportion(num_tokens: int, needed: Sequence[int]) -> list[int]:
    """Return how many of a document's tokens each rank gets, in proportion to the tokens that it needs.

    The last document fills every rank: no count is larger than what a rank needs, and the next document makes
    up for rounding.
    """
    counts, total = [], sum(needed)
    for left in needed:
        count = (2 * num_tokens * left + total) // (2 * total) if total else 0
        counts.append(count)
        num_tokens, total = num_tokens - count, total - left
    return counts


def _zigzag(document: range, counts: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Yield the ranks and the runs that they get of a document: in the order of ranks, then in reverse."""
    fronts = [(rank, count // 2) for rank, count in enumerate(counts)]
    backs = [(rank, count - count // 2) for rank, count in enumerate(counts)]
    start = document.start
    parts = ((rank, count) for rank, count in (*fronts, *reversed(backs)) if count)
    for rank, neighbours in groupby(parts, key=itemgetter(0)):
        length = sum(count for _, count in neighbours)
        yield rank, range(start, start + length)
        start += length
