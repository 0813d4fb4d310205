"""The samples of a step: the same for any data-parallel size, and consecutive through the run."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.data.batch_loader import microbatch_samples


def step(consumed: int, global_batch: int, micro: int, dp: int) -> list[int]:
    """All samples of a global batch, in the order of microbatches and ranks."""
    return [
        int(sample)
        for index in range(global_batch // (micro * dp))
        for rank in range(dp)
        for sample in microbatch_samples(consumed, index, micro, rank, dp)
    ]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_step_takes_the_next_samples_for_any_layout(dp: int, micro: int) -> None:
    assert step(2**33, 48, micro, dp) == list(range(2**33, 2**33 + 48))


def test_blocks_and_slices() -> None:
    assert microbatch_samples(100, 1, 2, 1, 3).tolist() == [108, 109]
    assert microbatch_samples(2**40, 0, 4, 0, 1).dtype == np.int64
