"""A stream of tokens cut into what the model reads at a time, each token's loss counted once.

Shapes: s tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Window(NamedTuple):
    """What the model reads at a time.

    Attributes:
        text: int64 ``[s + 1]``: inputs are all but the last, labels all but the first; the end of a stream is
            padded with zeros.
        counted: labels whose loss counts; those before them are context that another window has counted.
    """

    text: npt.NDArray[np.int64]
    counted: slice


def windows(pieces: Iterable[npt.NDArray[Any]], seq_length: int, stride: int) -> Iterator[Window]:
    """Windows over a stream that is given in pieces; of a long stream only some is in memory.

    Every token but the first, which nothing tells, is counted once.

    Args:
        seq_length: s.
        stride: from one window's beginning to the next one's, at most s: a token has s - stride tokens before
            it at the least, where the stream has them.
    """
    assert 0 < stride <= seq_length
    buffer = np.empty(0, np.int64)
    num_counted = 0  # labels from the buffer's beginning on
    for piece in pieces:
        buffer = np.concatenate((buffer, piece))
        first = 0
        while len(buffer) - first > seq_length:
            yield Window(buffer[first : first + seq_length + 1], slice(num_counted, seq_length))
            num_counted = seq_length - stride
            first += stride
        buffer = buffer[first:]
    num_labels = len(buffer) - 1
    if num_labels > num_counted:
        text = np.zeros(seq_length + 1, np.int64)
        text[: len(buffer)] = buffer
        yield Window(text, slice(num_counted, num_labels))
