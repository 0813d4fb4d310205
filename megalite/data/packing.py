"""Pack items of different lengths into samples of one size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Packing(NamedTuple):
    """Items of each sample.

    Attributes:
        items: int64 ``[n]``, numbers of the items, sample after sample.
        bounds: int64 ``[samples + 1]``, where each sample begins in `items`, and n at the end.
    """

    items: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]


def pack_best_fit(lengths: npt.NDArray[np.int64], size: int) -> Packing:
    """Place each item, the longest first, into the fullest sample that has space for it.

    Best-fit decreasing needs at most 11/9 of the smallest number of samples, and four more (Johnson et al.
    1974). Items of equal length keep their order.

    Args:
        lengths: int64 ``[n]``, from 1 to `size`.
        size: size of a sample.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= size
    order = np.argsort(-lengths, kind="stable")
    sample_of = np.empty(len(lengths), np.int64)
    with_space: dict[int, list[int]] = {}  # samples by their free space
    spaces = 0  # bit i is set if a sample has the free space i
    num_samples = 0
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1  # the lowest bit is the smallest space
            samples = with_space[space]
            sample = samples.pop()
            if not samples:
                spaces ^= 1 << space
        else:
            space, sample = size, num_samples
            num_samples += 1
        sample_of[item] = sample
        if left := space - length:
            with_space.setdefault(left, []).append(sample)
            spaces |= 1 << left
    items = np.argsort(sample_of, kind="stable")
    bounds = np.searchsorted(sample_of[items], np.arange(num_samples + 1))
    return Packing(items, bounds.astype(np.int64))


def one_per_sample(num_items: int) -> Packing:
    """Give each item a sample of its own."""
    return Packing(np.arange(num_items), np.arange(num_items + 1))
