#!/usr/bin/env python
"""Plans a run before there is a cluster for it: memory of a rank, time of an iteration, the best layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.plan.answer import answer


def main(arguments: Sequence[str]) -> None:
    """Prints what was asked for."""
    print("\n".join(answer(arguments)))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
