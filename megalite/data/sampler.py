"""Which samples a data-parallel rank takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def microbatch_samples(
    consumed: int, index: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> npt.NDArray[np.int64]:
    """The sample numbers of one microbatch on one data-parallel rank, int64 [micro_batch_size].

    A step takes consecutive blocks of micro_batch_size * dp_size samples from where the run stands, and a
    rank its slice of each. So a global batch is the same set of samples for any dp_size, and the number of
    consumed samples is all that resuming needs.

    Args:
        consumed: samples of the run before this global batch.
        index: of the microbatch in the global batch, from 0.
        micro_batch_size: samples a microbatch on a rank.
        dp_rank: the rank on the data-parallel axis.
        dp_size: the size of that axis.
    """
    first = consumed + (index * dp_size + dp_rank) * micro_batch_size
    return np.arange(first, first + micro_batch_size, dtype=np.int64)
