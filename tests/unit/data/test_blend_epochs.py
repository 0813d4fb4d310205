"""A dataset that is read once; `Epochs` is tested with the programs that use it."""

from __future__ import annotations

import numpy as np

from megalite.data.blend import Epochs, OnePass


class _Numbers:
    """Three samples that hold their numbers."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(2, index + 1)


def test_samples_after_the_last_one_are_zeros() -> None:
    dataset = OnePass(_Numbers(), 5)
    assert [dataset[i].tolist() for i in range(5)] == [[1, 1], [2, 2], [3, 3], [0, 0], [0, 0]]
    assert len(dataset) == 5


def test_number_is_that_of_the_sample() -> None:
    epochs = Epochs(_Numbers(), 9, seed=3)
    assert [epochs[i][0] - 1 for i in range(9)] == [epochs.number(i) for i in range(9)]
    for epoch in range(3):
        assert sorted(epochs.number(3 * epoch + i) for i in range(3)) == [0, 1, 2]
