from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def build_sample_index(
    sequence_lengths: npt.NDArray[Any],
    document_index: npt.NDArray[Any],
    seq_length: int,
    num_samples: int,
    wide: bool = False,
) -> npt.NDArray[Any]: ...
def build_blend_index(
    weights: Sequence[float], num_samples: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]: ...
