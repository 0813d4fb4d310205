"""Order the rows of a weight by group of heads, as ours are, or by kind of row, as in most families."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_kinds(full: Tensor, num_groups: int, rows: Sequence[int]) -> list[Tensor]:
    """Return rows that are ordered by group as one tensor for each kind of row.

    Args:
        full: ``[num_groups sum(rows), ...]``.
        rows: numbers of rows of each kind in a group.
    """
    parts = full.unflatten(0, (num_groups, -1)).split(list(rows), dim=1)
    return [part.flatten(0, 1) for part in parts]


def join_kinds(parts: Sequence[Tensor], num_groups: int, rows: Sequence[int]) -> Tensor:
    """Return the rows of all kinds, ordered by group; the inverse of `split_kinds`.

    Raises:
        RuntimeError: a kind has another number of rows.
    """
    grouped = [part.unflatten(0, (num_groups, size)) for part, size in zip(parts, rows, strict=True)]
    return torch.cat(grouped, dim=1).flatten(0, 1)
