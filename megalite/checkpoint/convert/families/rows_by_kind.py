"""Transforms of recurrent mixers' weights, whose rows are ordered by group of heads in ours alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.checkpoint.convert.families.family import Parts, Transform
from megalite.checkpoint.convert.families.grouped_rows import join_kinds, split_kinds
from megalite.config import ModelConfig


def by_kind(groups_and_rows: Callable[[ModelConfig], tuple[int, Sequence[int]]], apart: int = 0) -> Transform:
    """Return the transform of rows that are ordered by group in ours, and by kind in theirs.

    Args:
        groups_and_rows: returns the number of groups, and the numbers of rows of each kind in a group.
        apart: how many of the last kinds are tensors of their own in theirs; the others are one tensor.
    """

    def to_hf(full: Tensor, config: ModelConfig) -> Parts:
        groups, rows = groups_and_rows(config)
        parts = split_kinds(full, groups, rows)
        joined = len(rows) - apart
        return [torch.cat(parts[:joined]), *parts[joined:]]

    def from_hf(parts: Parts, config: ModelConfig) -> Tensor:
        groups, rows = groups_and_rows(config)
        joined = parts[0].split([groups * size for size in rows[: len(rows) - apart]])
        return join_kinds([*joined, *parts[1:]], groups, rows)

    return Transform(to_hf, from_hf)


def with_kernel_dim(transform: Transform) -> Transform:
    """Return the transform of a convolution's weight, whose second dim is 1 in theirs."""
    return Transform(
        lambda full, config: [part.unsqueeze(1) for part in transform.to_hf(full, config)],
        lambda parts, config: transform.from_hf([part.squeeze(1) for part in parts], config),
    )
