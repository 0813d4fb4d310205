"""Plan a run without a cluster: memory per rank, time per iteration, and the best layout."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.plan.plan_report import answer
from megalite.utils.log import ProgressLine


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    with ProgressLine() as show:
        lines = answer(arguments, show)
    print("\n".join(lines))
