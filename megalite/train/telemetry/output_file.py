"""Append to a file; a failure to write does not end the run."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from megalite.utils.errors import UserError
from megalite.utils.log import THIS_RANK, log

MAX_HELD_BYTES = 16 * 2**20
"""Bytes of records that are kept in memory while the disk is full; further records are lost."""


class OutputFile:
    """File of complete records, which keeps records in memory while they cannot be written.

    A full disk may cut off a record. The rest of it is written first once there is space, so the file stays
    readable. Failures are not raised; the log shows when they begin and end.

    Args:
        flag: the option that names the file, for messages.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self._path = path
        self._name = f"{flag} {path}"
        self._records: deque[bytes] = deque()
        self._num_held_bytes = 0
        self._num_written = 0  # bytes of the first record
        self._num_lost = 0
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UserError(f"{self._name} cannot be written ({error.strerror}): pass another file") from None

    def write(self, record: bytes) -> None:
        """Add a record, which `flush` writes."""
        if self._num_held_bytes + len(record) > MAX_HELD_BYTES:
            self._num_lost += 1
            return
        self._records.append(record)
        self._num_held_bytes += len(record)

    def flush(self) -> None:
        """Write the pending records; if that fails, they stay pending."""
        try:
            if self._is_failing:
                self._reopen()
            while self._records:
                self._write_some()
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s): training continues; up to %d MiB of records are kept, and "
                    "written once there is space",
                    self._name,
                    error.strerror,
                    MAX_HELD_BYTES >> 20,
                    extra=THIS_RANK,
                )
            self._is_failing = True
            return
        if self._is_failing:
            lost = f"; {self._num_lost} records were lost" if self._num_lost else ""
            log.warning("%s is written again%s", self._name, lost, extra=THIS_RANK)
        self._is_failing, self._num_lost = False, 0

    def close(self) -> None:
        """Write the pending records, or log how many are lost, and close the file."""
        self.flush()
        if num_lost := self._num_lost + len(self._records):
            log.warning("%s: the last %d records are lost", self._name, num_lost, extra=THIS_RANK)
        try:
            self._file.close()
        except OSError as error:  # NFS reports only here that a quota is exceeded
            log.warning("%s: its last records may be lost (%s)", self._name, error.strerror, extra=THIS_RANK)

    def _write_some(self) -> None:
        """Write the rest of the first record, or as much of it as fits on the disk."""
        record = self._records[0]
        self._num_written += self._file.write(record[self._num_written :])
        self._size = self._file.tell()
        if self._num_written == len(record):
            self._records.popleft()
            self._num_held_bytes -= len(record)
            self._num_written = 0

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()

    def _reopen(self) -> None:
        """Reopen the file: it may have been deleted to make space, or its file system remounted."""
        size = self._size
        self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        if self._size != size:
            self._num_written = 0  # the beginning of a cut record is lost
