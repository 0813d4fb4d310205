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
    progress: Progress | None = None,
) -> npt.NDArray[Any]: ...
def build_sentence_samples(
    document_bounds: npt.NDArray[Any],
    sequence_lengths: npt.NDArray[Any],
    num_samples: int,
    max_tokens: int,
    short_prob: float,
    min_sentences: int,
    seed: int,
    progress: Progress | None = None,
) -> npt.NDArray[np.int64]: ...
def build_blend_index(
    weights: Sequence[float],
    num_samples: int,
    progress: Progress | None = None,
    owed: Sequence[float] = (),
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]: ...
def empty_bytes(size: int) -> npt.NDArray[np.uint8]: ...
def check_sequences(
    lengths: npt.NDArray[Any], offsets: npt.NDArray[Any], itemsize: int, end: int
) -> tuple[int, int]: ...
def is_ascending(values: npt.NDArray[Any]) -> bool: ...

class TokenSource:
    def __init__(
        self, parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]]
    ) -> None: ...
    def gather_samples(
        self,
        document_index: npt.NDArray[Any],
        sample_index: npt.NDArray[Any],
        rows: npt.NDArray[Any],
        out: npt.NDArray[np.int64],
    ) -> tuple[int, int]: ...
    def gather_spans(self, begins: npt.NDArray[Any], out: npt.NDArray[np.int64]) -> tuple[int, int]: ...

class Progress:
    @property
    def done(self) -> int: ...

class FileChange:
    none: FileChange
    lost: FileChange
    longer: FileChange
    modified: FileChange
    rewritten: FileChange

class MappedFile:
    def __init__(self, path: bytes, writable: bool = False, is_shared: bool = False) -> None: ...
    def array(self) -> npt.NDArray[np.uint8]: ...
    def release(self) -> None: ...
    def read_randomly(self) -> None: ...
    def change(self, max_age_ms: int = 0, asks_server: bool = False) -> FileChange: ...

class FileSet:
    def __init__(self, files: Sequence[MappedFile]) -> None: ...
    def is_unchanged(self, max_age_ms: int) -> bool: ...

def permute(numbers: npt.NDArray[np.int64], size: int, keys: Sequence[int]) -> npt.NDArray[np.int64]: ...

class LegacyRandom:
    def __init__(self, seed: int) -> None: ...
    def fill_shuffled(
        self, out: npt.NDArray[Any], start: int, stop: int, progress: Progress | None = None
    ) -> None: ...
