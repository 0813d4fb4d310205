"""Plan a run without a cluster: memory per rank, time per iteration, the best layout."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.plan.plan_report import answer


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    print("\n".join(answer(arguments)))
