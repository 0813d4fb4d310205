#!/usr/bin/env python
"""Plan a run without a cluster: memory per rank, time per iteration, the best layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.config.entry_point import run_main
from megalite.plan.plan_report import answer


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    print("\n".join(answer(arguments)))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
