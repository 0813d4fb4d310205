"""Covering arrays: few cases that have every pair of parts of many."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Names and values of two parts."""


def pairs(parts: Mapping[str, Any]) -> set[Pair]:
    """Return all pairs of parts."""
    return set(itertools.combinations(sorted((name, str(value)) for name, value in parts.items()), 2))


def by_new_pairs(cases: Sequence[T], parts: Callable[[T], Mapping[str, Any]]) -> Iterator[tuple[T, int]]:
    """Yield cases, next always the one with most pairs that no earlier one has, and the number of these."""
    all_pairs = [pairs(parts(case)) for case in cases]
    seen: set[Pair] = set()
    queue = [(-len(each), number) for number, each in enumerate(all_pairs)]
    heapq.heapify(queue)
    while queue:
        _, number = heapq.heappop(queue)
        new = all_pairs[number] - seen
        entry = (-len(new), number)
        if queue and entry > queue[0]:  # earlier cases have taken some of its pairs
            heapq.heappush(queue, entry)
            continue
        seen |= new
        yield cases[number], len(new)
