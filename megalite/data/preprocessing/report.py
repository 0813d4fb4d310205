"""What a run has written, in numbers."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from megalite.folders import open_new
from megalite.parsing import parse_json

_BLOCK = 1 << 20


@dataclass(frozen=True)
class DatasetReport:
    """One dataset: the same for any number of workers, and with or without an interruption."""

    prefix: str
    """Of the .bin and .idx."""
    num_documents: int
    num_sequences: int
    num_tokens: int
    """With the end-of-document tokens."""
    num_text_bytes: int
    """Of the documents' texts in UTF-8."""
    bytes_per_token: float
    num_skipped: int
    """Bad records, of which nothing is in the dataset."""
    unknown_share: float | None
    """Of all tokens; None where the tokenizer has no token for the unknown, as a byte-level one."""
    length_histogram: dict[str, int]
    """Number of documents by their number of tokens, in powers of two: "4-7" and so on."""
    dtype: str
    sha256: dict[str, str]
    """Digests of the .bin and .idx, as the command sha256sum tells them."""
    made_with: dict[str, Any]
    """The flags that the dataset depends on."""

    def write(self, path: str) -> None:
        with open_new(path) as stream:
            stream.write(f"{json.dumps(asdict(self), indent=2)}\n".encode())

    def lines(self) -> list[str]:
        """For people."""
        unknown = "none possible" if self.unknown_share is None else f"{self.unknown_share:.4%}"
        widest = max(self.length_histogram.values(), default=1)
        width = max(map(len, self.length_histogram), default=0)
        rows = [
            f"  {name:>{width}} tokens  {count:>12,}  {'#' * max(1, round(40 * count / widest))}"
            for name, count in self.length_histogram.items()
            if count
        ]
        return [
            f"{self.prefix}: {self.num_documents:,} documents, {self.num_tokens:,} tokens ({self.dtype}), "
            f"{self.bytes_per_token:.3f} bytes a token, unknown tokens: {unknown}, "
            f"{self.num_skipped:,} skipped",
            *rows,
            f"  sha256 of the .bin {self.sha256['bin']}",
        ]


def read_report(prefix: str) -> dict[str, Any] | None:
    """The report beside a dataset; None if there is none."""
    try:
        with open(f"{prefix}.json", encoding="utf-8") as stream:
            report: dict[str, Any] = parse_json(stream.read())
    except (OSError, ValueError):
        return None
    return report


def name_histogram(counts: list[int]) -> dict[str, int]:
    """The counts of powers of two by the lengths that they count."""
    return {("1" if i == 0 else f"{2**i}-{2 ** (i + 1) - 1}"): count for i, count in enumerate(counts)}


def digests(paths: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of files, each in a thread."""
    with ThreadPoolExecutor(len(paths)) as pool:
        return dict(zip(paths, pool.map(_digest, paths.values()), strict=True))


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
