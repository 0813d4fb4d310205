"""Logging: megalite has one stream, and only rank 0 logs by default."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it

log = logging.getLogger("megalite")

THIS_RANK = {"this_rank": True}
"""Pass as ``extra`` to log a message on this rank, even if it is not rank 0."""

_SECONDS_BETWEEN_LINES = 10.0


class _RankFilter(logging.Filter):
    """Filter that passes rank 0's messages, and other ranks' messages that are marked with `THIS_RANK`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or getattr(record, "this_rank", False)


class _Formatter(logging.Formatter):
    """Format of a message: its text alone, with the level in front from WARNING up."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


class _Handler(_StreamHandler):
    """Handler of a stream. If a write fails, it reports once on standard error, and the run continues.

    Messages that cannot be written at exit are dropped. Otherwise Python would exit with status 120.
    """

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            atexit.register(self._drop_unwritten)
            with suppress(OSError):
                sys.stderr.write(
                    f"warning: the log cannot be written ({error.strerror}): the run continues, and messages "
                    "are lost until there is space\n"
                )

    def _drop_unwritten(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def configure_logging(rank: int, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send megalite's messages to standard output, or to another stream.

    Call it once per process, before the first message.
    """
    handler = _Handler(stream or sys.stdout)
    handler.setFormatter(_Formatter())
    handler.addFilter(_RankFilter(rank))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False


def log_notes(notes: Iterable[str]) -> None:
    """Log what a user should know, but need not change, in one block."""
    for note in notes:
        log.info("note: %s", note)


def is_on_terminal() -> bool:
    """Return whether megalite's messages go to a terminal."""
    streams = [handler.stream for handler in log.handlers if isinstance(handler, logging.StreamHandler)]
    return any(stream.isatty() for stream in streams)


class ProgressLine:
    """Changing line of progress on standard error, if that is a terminal; otherwise a line now and then.

    Args:
        seconds_between: least time between two texts on a terminal, and before the first one.
        seconds_between_lines: the same elsewhere; by default there are no lines.
    """

    def __init__(self, seconds_between: float = 0.2, seconds_between_lines: float = math.inf) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._seconds_between = seconds_between if self._is_terminal else seconds_between_lines
        self._shown_at = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._shown_at >= self._seconds_between:
            self._write(f"\r{text}\033[K" if self._is_terminal else f"{text}\n")
            self._shown_at = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line."""
        if self._is_terminal:
            self._write("\r\033[K")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class LineInterval:
    """Limit on how often a line of progress is logged."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the next line is due, and if so, start the next interval."""
        is_over = time.monotonic() - self._last > _SECONDS_BETWEEN_LINES
        if is_over:
            self._last = time.monotonic()
        return is_over
