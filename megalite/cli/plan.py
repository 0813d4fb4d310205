"""Plan a run without a cluster: memory per rank, time per iteration, and the best layout."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from megalite.plan.plan_report import answer

_SECONDS_BETWEEN_SHOWS = 0.2


class ProgressLine:
    """Shows a line of progress on stderr if stderr is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._is_terminal and time.monotonic() - self._shown_at > _SECONDS_BETWEEN_SHOWS:
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
            self._shown_at = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line."""
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    with ProgressLine() as show:
        lines = answer(arguments, show)
    print("\n".join(lines))
