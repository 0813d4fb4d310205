"""Token ids as arrays, which hold no Python object for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[Any]
"""Ids in one dimension, of whichever integer type the tokenizer's engine gives."""


def id_arrays(lists: Iterable[Sequence[int]]) -> list[IdArray]:
    """The arrays of lists that an engine gives."""
    return [np.array(ids, np.int64) for ids in lists]
