"""Read ranges of several files at a time; those of a store are fetched together, and checked."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.storage import CachedBytes, MappedBytes, fetch_missing
from megalite.utils.errors import UserError

_CHECKSUM_BYTES = 64 << 10
"""Bytes of checksums to fetch at a time."""
_MAX_ATTEMPTS = 5


class Check(NamedTuple):
    """Bytes from `begin` to `end` of a file, in pieces with a CRC-32 each, or in one.

    The checksums are little-endian uint32 from byte `at` of their file on.
    """

    begin: int
    end: int
    checksums: MappedBytes
    at: int
    piece_bytes: int = sys.maxsize

    @property
    def end_of_checksums(self) -> int:
        return self.at + 4 * -(-(self.end - self.begin) // self.piece_bytes)

    def damaged(
        self, data: npt.NDArray[np.uint8], listed: npt.NDArray[np.uint8]
    ) -> list[tuple[int, int, int]]:
        """Return the begin and end of each piece that does not have its checksum, and where the checksum is.

        Args:
            data: the bytes from `begin` to `end`.
            listed: the bytes of their checksums.
        """
        begins = range(0, len(data), self.piece_bytes)
        found = [zlib.crc32(data[begin : begin + self.piece_bytes].data) for begin in begins]
        differs = np.flatnonzero(np.array(found, "<u4") != listed.view("<u4")).tolist()
        starts = [(self.begin + begins[number], self.at + 4 * number) for number in differs]
        return [(start, min(start + self.piece_bytes, self.end), at) for start, at in starts]


class FileRange(NamedTuple):
    """Bytes from `begin` to `end` of a file, and a check of bytes that include them if there is one."""

    file: MappedBytes
    begin: int
    end: int
    check: Check | None = None

    @property
    def checked(self) -> tuple[int, int]:
        """Return the begin and the end of the bytes to read."""
        return (self.begin, self.end) if self.check is None else self.check[:2]


def read_ranges(ranges: Sequence[FileRange]) -> list[npt.NDArray[np.uint8]]:
    """Return copies of ranges of files; what is missing of those in a store is fetched in one go.

    Bytes from a store that do not have their checksum are fetched once again.

    Raises:
        UserError: see `CachedBytes.fetch`, or bytes are wrong again.
    """
    parts: dict[int, npt.NDArray[np.uint8]] = {}
    damaged = set[tuple[MappedBytes, int]]()
    for _ in range(_MAX_ATTEMPTS):  # another process may remove what was fetched
        fetch_ranges([each for i, each in enumerate(ranges) if i not in parts])
        for i, each in enumerate(ranges):
            file, check, (begin, end) = each.file, each.check, each.checked
            if i in parts or (part := file.copy(begin, end)) is None:
                continue
            if check is not None:
                if (listed := check.checksums.copy(check.at, check.end_of_checksums)) is None:
                    continue
                if wrong := check.damaged(part, listed):
                    assert isinstance(file, CachedBytes), "only bytes from a store are checked"
                    for start, stop, at in wrong:
                        if (file, start) in damaged:
                            raise file.damaged(start, stop)
                        damaged.add((file, start))
                        file.forget(start, stop)
                        check.checksums.forget(at, at + 4)  # either may be wrong
                    continue
            parts[i] = part[each.begin - begin : each.end - begin]
        if len(parts) == len(ranges):
            return [parts[i] for i in range(len(ranges))]
    raise UserError("the cache cannot hold the samples of one batch: raise --data-cache-bytes")


def fetch_ranges(ranges: Sequence[FileRange]) -> None:
    """Fetch what the cache lacks of ranges of files in a store, in one go; see `CachedBytes.fetch`."""
    wanted: dict[CachedBytes, dict[tuple[int, int], None]] = {}
    for each in ranges:
        spans = [(each.file, *each.checked)]
        if each.check is not None:
            sums, size = each.check.checksums, _CHECKSUM_BYTES
            last = -(-each.check.end_of_checksums // size) * size
            spans.append((sums, each.check.at // size * size, min(last, len(sums.array))))
        for file, begin, end in spans:
            if isinstance(file, CachedBytes):
                wanted.setdefault(file, {})[begin, end] = None
    fetch_missing({file: list(found) for file, found in wanted.items()})
