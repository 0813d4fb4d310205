"""Read the loss mask of a corpus of conversations: a byte per token in PREFIX.loss_mask, 1 in answers."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from megalite.data.file_ranges import FileRange, read_ranges
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.storage import MappedBytes, open_bytes
from megalite.utils.errors import UserError

LOSS_MASK = "loss_mask"
"""Suffix of the file."""
NUM_CHECKED = 16
"""Number of a corpus's conversations to check for answers."""


def has_loss_mask(corpus: IndexedDataset) -> bool:
    """Return whether a corpus on this machine has a loss mask; False for one in object storage."""
    return not corpus.is_remote and any(os.path.exists(loss_mask_path(each.prefix)) for each in corpus.shards)


def loss_mask_path(prefix: str) -> str:
    """Return the path of the file that holds the loss mask of a corpus."""
    return f"{prefix.removeprefix('file://')}.{LOSS_MASK}"


class LossMask:
    """Memory-mapped loss mask of a corpus.

    Attributes:
        files: the mapped file of each shard.

    Raises:
        UserError: the corpus has no loss mask, or the mask of another corpus.
    """

    def __init__(self, corpus: IndexedDataset) -> None:
        self.files: tuple[MappedBytes, ...] = tuple(map(_open_mask, corpus.shards))
        self._corpus = corpus

    def __getitem__(self, sequence: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of a sequence belong to answers."""
        number, found = self._corpus.locate(sequence)
        begin, end = (position // self._corpus.dtype.itemsize for position in (found.begin, found.end))
        return read_ranges([FileRange(self.files[number], begin, end)])[0] != 0

    def check(self, prefix: str) -> None:
        """Refuse a mask that marks nothing in the first conversations.

        Raises:
            UserError: none of their tokens belongs to an answer.
        """
        first = range(min(NUM_CHECKED, len(self._corpus)))
        if first and not any(self[i].any() for i in first):
            raise UserError(
                f"{prefix}.{LOSS_MASK} marks no token of the first {len(first)} conversations as an answer, "
                "so nothing would be learned: preprocess the conversations again with --chat"
            )


def _open_mask(shard: IndexedDataset) -> MappedBytes:
    path = loss_mask_path(shard.prefix)
    try:
        file = open_bytes(path)
    except FileNotFoundError:
        raise UserError(
            f"{shard.prefix} has no answers marked, there is no {path}: preprocess conversations with "
            "--chat, or train without --sft"
        ) from None
    if len(file.array) != shard.num_tokens:
        raise UserError(
            f"{path} has {len(file.array)} bytes, and {shard.prefix}.bin {shard.num_tokens} "
            "tokens: one belongs to another dataset; preprocess it again"
        )
    return file
