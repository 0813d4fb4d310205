"""Sums over the pieces that are done."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from megalite.data.preprocessing.encoder import ColumnResult
from megalite.data.preprocessing.shard import Extent, append_extent


@dataclass
class Progress:
    """What is done so far.

    Attributes:
        num_documents: written, of the key with the most.
        num_tokens: written, over all keys.
        num_bytes: of text read, uncompressed.
        num_skipped: bad records.
        num_input_bytes: of the input as it is, compressed perhaps.
        total_input_bytes: of all of it; 0 where it is not known, of standard input.
        num_resumed_bytes: how many of num_bytes, ..
        num_resumed_input_bytes: .. of num_input_bytes, ..
        num_resumed_tokens: .. and of num_tokens an interrupted run had done before.
        seconds: since the start.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_skipped: int = 0
    num_input_bytes: int = 0
    total_input_bytes: int = 0
    num_resumed_bytes: int = 0
    num_resumed_input_bytes: int = 0
    num_resumed_tokens: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        return (self.num_bytes - self.num_resumed_bytes) / max(self.seconds, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        return (self.num_tokens - self.num_resumed_tokens) / max(self.seconds, 1e-9)

    @property
    def share(self) -> float | None:
        """Of the input that is done, 0 to 1; None where its size is not known."""
        return min(1.0, self.num_input_bytes / self.total_input_bytes) if self.total_input_bytes else None

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None where nothing is known."""
        done = self.num_input_bytes - self.num_resumed_input_bytes
        if not self.total_input_bytes or not done:
            return None
        return max(0, self.total_input_bytes - self.num_input_bytes) * self.seconds / done


@dataclass
class ColumnTotal:
    """One dataset so far."""

    extents: list[Extent] = field(default_factory=list)
    num_documents: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    num_unknown: int = 0
    histogram: list[int] = field(default_factory=list)

    def add(self, result: ColumnResult) -> None:
        append_extent(self.extents, result.extent)
        self.num_tokens += result.extent.tokens[1]
        self.num_sequences += result.extent.sequences[1]
        self.num_documents += result.extent.documents[1]
        self.num_text_bytes += result.num_text_bytes
        self.num_unknown += result.num_unknown
        pairs = itertools.zip_longest(self.histogram, result.histogram, fillvalue=0)
        self.histogram = [a + b for a, b in pairs]
