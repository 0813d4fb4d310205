"""The logger of every part of megalite: one stream, quiet on every rank but the first."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

log = logging.getLogger("megalite")

THIS_RANK = {"this_rank": True}
"""Pass as ``extra`` for a message that this rank tells for all ranks: printed as it is, whichever it is."""


class _RankFilter(logging.Filter):
    """Lets rank 0 speak, and the others only where a message says so."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or getattr(record, "this_rank", False)


class _Formatter(logging.Formatter):
    """Prints a message as it is, and names its level from WARNING up."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


class _Handler(logging.StreamHandler[TextIO]):
    """Writes messages to a stream; where that fails, it says so once on standard error, and the run goes on.

    A stream that cannot take its last messages at exit drops them: else Python would exit with status 120.
    """

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            atexit.register(self._drop_what_is_left)
            with suppress(OSError):
                sys.stderr.write(
                    f"warning: the log cannot be written ({error.strerror}): the run goes on, and messages "
                    "are lost until there is space\n"
                )

    def _drop_what_is_left(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def configure_logging(rank: int, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Sends megalite's messages to standard output, or another stream.

    Call it once a process, before the first message.
    """
    handler = _Handler(stream or sys.stdout)
    handler.setFormatter(_Formatter())
    handler.addFilter(_RankFilter(rank))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False
