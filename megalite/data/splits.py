"""The parts of a dataset that training, validation and test take."""

from __future__ import annotations

import numpy as np

from megalite.config.data import split_weights
from megalite.errors import UserError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """The weights of train, valid and test, normalised to 1; those left out are 0.

    Raises:
        UserError: the text is not one to three numbers that are not negative, with a positive sum.
    """
    weights = split_weights(text)
    if not weights:
        raise UserError(f"--split {text} must be one to three weights with a positive sum, such as 949,50,1")
    full = np.array(weights + [0.0] * (3 - len(weights)))
    train, valid, test = (full / np.sum(full)).tolist()
    return train, valid, test


def split_ranges(text: str, num_sequences: int) -> tuple[range, range, range]:
    """The sequences of each split: consecutive, from rounded cumulative weights; a range may be empty."""
    cumulative, bounds = 0.0, [0]
    for weight in parse_split(text):
        cumulative += weight
        bounds.append(round(cumulative * num_sequences))
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])
