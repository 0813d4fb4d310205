"""Log the progress of a long build in C++."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megalite.data import _index_builder
from megalite.utils.log import THIS_RANK, log

INTERVAL_SECONDS = 10.0
"""Seconds between two log lines; a shorter build logs no line."""


@contextmanager
def reported_progress(what: str, unit: str, total: int) -> Iterator[_index_builder.Progress]:
    """Log the progress of the build in this block, from a thread, on the rank that builds.

    Args:
        what: name of the object that is built.
        unit: name of the counted unit, in the plural.
        total: number of units at the end.
    """
    progress, done = _index_builder.Progress(), threading.Event()

    def report() -> None:
        start, last_count = time.monotonic(), 0
        while not done.wait(INTERVAL_SECONDS):
            count = progress.done
            rate = (count - last_count) / INTERVAL_SECONDS
            mean = count / (time.monotonic() - start)
            left = f", about {(total - count) / mean:.0f} s left" if mean > 0 else ""
            log.info(
                "building %s: %s of %s %s (%.0f%%), %s million/s%s",
                *(what, f"{count:,}", f"{total:,}", unit, 100 * count / max(1, total)),
                *(f"{rate / 1e6:.1f}", left),
                extra=THIS_RANK,
            )
            last_count = count

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        done.set()
        thread.join()
