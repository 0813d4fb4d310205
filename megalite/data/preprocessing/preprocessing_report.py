"""Count the input and output of a preprocessing run, while it runs and at its end."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.data.preprocessing.encoder import ColumnResult, add_counts
from megalite.data.preprocessing.shards import Extent, append_extent
from megalite.utils.files import open_new, parse_json


@dataclass
class PreprocessingProgress:
    """Counts of the work done so far.

    Attributes:
        num_documents: number of documents written, for the key with the most.
        num_tokens: number of tokens written, over all keys.
        num_bytes: bytes of text read, uncompressed.
        num_skipped: number of bad records.
        num_empty: number of documents without a token under the key that has the fewest of them.
        num_input_bytes: bytes of input files read, before decompression.
        total_input_bytes: bytes of all input files; 0 if unknown, as for standard input.
        num_resumed_bytes, num_resumed_input_bytes, num_resumed_tokens: part of these that an interrupted run
            had already done.
        seconds: seconds since the start.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_skipped: int = 0
    num_empty: int = 0
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
        """Return the share of the input that is done, 0 to 1; None if its size is unknown."""
        return min(1.0, self.num_input_bytes / self.total_input_bytes) if self.total_input_bytes else None

    @property
    def seconds_left(self) -> float | None:
        """Return the remaining seconds at the average speed so far; None if unknown."""
        done = self.num_input_bytes - self.num_resumed_input_bytes
        if not self.total_input_bytes or not done:
            return None
        return max(0, self.total_input_bytes - self.num_input_bytes) * self.seconds / done


@dataclass
class ColumnTotal:
    """Counts of one dataset so far."""

    extents: list[Extent] = field(default_factory=list)
    num_documents: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    num_unknown: int = 0
    num_ends: int = 0
    num_special: int = 0
    first_special: str = ""
    num_empty: int = 0
    histogram: list[int] = field(default_factory=list)

    def add(self, result: ColumnResult) -> None:
        append_extent(self.extents, result.extent)
        self.num_tokens += result.extent.tokens[1]
        self.num_sequences += result.extent.sequences[1]
        self.num_documents += result.extent.documents[1]
        self.num_text_bytes += result.num_text_bytes
        self.num_unknown += result.num_unknown
        self.num_ends += result.num_ends
        self.num_special += result.num_special
        self.num_empty += result.num_empty
        self.histogram = add_counts(self.histogram, result.histogram)


_BLOCK = 1 << 20


@dataclass(frozen=True)
class DatasetReport:
    """Report on one dataset: the same for any number of workers, with or without an interruption."""

    prefix: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    """Number of tokens, including the end-of-document tokens."""
    num_text_bytes: int
    """Size of the documents' texts in UTF-8, in bytes."""
    bytes_per_token: float
    num_skipped: int
    """Number of bad records, which are not in the dataset."""
    unknown_share: float | None
    """Share of unknown tokens; None if the tokenizer has no unknown token, such as a byte-level one."""
    length_histogram: dict[str, int]
    """Number of documents by their number of tokens, in powers of two: "4-7" and so on."""
    dtype: str
    sha256: dict[str, str]
    """SHA-256 of the .bin and .idx, as the command sha256sum prints it."""
    made_with: dict[str, Any]
    """Flags that the dataset depends on."""
    num_answer_tokens: int | None = None
    """Number of tokens of answers in conversations; None for a dataset of plain documents."""
    num_ends_in_texts: int = 0
    """Number of end-of-document tokens in the texts themselves; each ends a document in training."""
    num_special_in_texts: int = 0
    """Number of documents whose text contains the name of a special token, which becomes the token."""
    first_special_in_texts: str = ""
    """The first of these documents, and its token."""
    num_empty: int = 0
    """Number of documents without a token, which are not in the dataset."""

    def write(self, path: str) -> None:
        with open_new(path) as stream:
            stream.write(f"{json.dumps(asdict(self), indent=2)}\n".encode())

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        unknown = "none possible" if self.unknown_share is None else f"{self.unknown_share:.4%}"
        widest = max(self.length_histogram.values(), default=1)
        width = max(map(len, self.length_histogram), default=0)
        rows = [
            f"  {name:>{width}} tokens  {count:>12,}  {'#' * max(1, round(40 * count / widest))}"
            for name, count in self.length_histogram.items()
            if count
        ]
        answers = "" if self.num_answer_tokens is None else f", {self.num_answer_tokens:,} of them in answers"
        return [
            f"{self.prefix}: {self.num_documents:,} documents, {self.num_tokens:,} tokens "
            f"({self.dtype}){answers}, {self.bytes_per_token:.3f} bytes a token, unknown tokens: {unknown}, "
            f"{skipped_text(self)}",
            *rows,
            f"  sha256 of the .bin {self.sha256['bin']}",
        ]


def skipped_text(counts: PreprocessingProgress | DatasetReport) -> str:
    """Return how many documents are not in the output, and why."""
    empty = f", {counts.num_empty:,} empty" if counts.num_empty else ""
    return f"{counts.num_skipped:,} skipped{empty}"


def read_report(prefix: str) -> dict[str, Any] | None:
    """Return the report beside a dataset; None if there is none."""
    try:
        with open(f"{prefix}.json", encoding="utf-8") as stream:
            report: dict[str, Any] = parse_json(stream.read())
    except (OSError, ValueError):
        return None
    return report


def name_histogram(counts: list[int]) -> dict[str, int]:
    """Return the counts by range of lengths instead of power of two."""
    return {("1" if i == 0 else f"{2**i}-{2 ** (i + 1) - 1}"): count for i, count in enumerate(counts)}


def digests(paths: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 of files, each computed in a thread."""
    with ThreadPoolExecutor(len(paths)) as pool:
        return dict(zip(paths, pool.map(_digest, paths.values()), strict=True))


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
