"""Recognize a tensor or a number that is wrong by a common factor, such as the size of an axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from torch import Tensor

_NAMED = 1e-6
"""Largest relative difference between a factor and the number that it is called by."""


def factor_of(value: Tensor, reference: Tensor, exact: float) -> float | None:
    """Return the number that gives the value when it is multiplied with the reference; None if there is none.

    Args:
        exact: relative deviation from a multiple that still counts as one.
    """
    squared = float(reference.square().sum())
    if squared == 0.0:
        return None
    factor = float((value * reference).sum()) / squared
    rest = float((value - factor * reference).square().sum())
    return factor if rest <= exact**2 * squared else None


def named_factor(factor: float, sizes: Mapping[str, int]) -> str:
    """Return a factor in words, such as ``2 (tp or dp) times``.

    Args:
        sizes: numbers of the layout that a factor can come from, by name.
    """
    if factor == 0.0:
        return "zero"
    shown = f"{factor:.6g}"
    for candidates in _candidates({name: size for name, size in sizes.items() if size > 1}):
        if names := [name for name, value in candidates.items() if abs(factor / value - 1) < _NAMED]:
            return f"{shown} ({' or '.join(names)}) times"
    return f"{shown} times"


def _candidates(sizes: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Yield what factors can be called, the simplest first."""
    products = {
        " * ".join(names): float(math.prod(sizes[name] for name in names))
        for count in (1, 2, 3)
        for names in itertools.combinations(sizes, count)
    }
    yield {"-1": -1.0}
    yield products
    yield {f"1/{name}" if "*" not in name else f"1/({name})": 1.0 / value for name, value in products.items()}
    yield {
        f"{a}/{b}": sizes[a] / sizes[b] for a, b in itertools.permutations(sizes, 2) if sizes[a] != sizes[b]
    }
    yield {f"sqrt({name})": math.sqrt(value) for name, value in products.items()}
    yield {f"1/sqrt({name})": 1.0 / math.sqrt(value) for name, value in products.items()}
