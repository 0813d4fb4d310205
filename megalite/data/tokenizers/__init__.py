"""Encode text to token ids, and decode it. Ids are in arrays, without a Python object for each id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[Any]
"""One-dimensional array of ids, in the integer type that the tokenizer's engine returns."""


def id_arrays(lists: Iterable[Sequence[int]]) -> list[IdArray]:
    """Convert lists of ids to arrays."""
    return [np.array(ids, np.int64) for ids in lists]
