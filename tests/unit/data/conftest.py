"""Small datasets on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed_dataset import IndexedWriter

WriteDataset = Callable[..., str]


@pytest.fixture
def write_dataset(tmp_path: Path) -> WriteDataset:
    """Writes a dataset of the given document lengths, tokens counted up from 0, and returns its prefix."""

    def write(lengths: Sequence[int], name: str = "corpus", dtype: str = "uint16", first: int = 0) -> str:
        prefix = str(tmp_path / name)
        tokens = np.arange(first, first + sum(lengths))
        with IndexedWriter(prefix, dtype) as writer:
            writer.add_documents(tokens, np.array(lengths, dtype=np.int32))
        return prefix

    return write
