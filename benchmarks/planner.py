#!/usr/bin/env python
"""Compare the planner with published runs: time of an iteration, memory of a rank, parameters.

PYTHONPATH=. python benchmarks/planner.py [--cases FILE.csv]
PYTHONPATH=. python benchmarks/planner.py --cases benchmarks/planner_held_out_cases.csv

Each line's GPU, layout, recomputation and program (how attention is computed, what gradients are kept in)
are as published; everything else is one model of the hardware. A micro-batch that was not published is 4.
A line says what the time is made of. benchmarks/planner_flags.py plans the same runs by their flags alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.other_programs import OtherPlan
from benchmarks.published_runs import Published, read_published
from megalite.plan.estimate import RunPlan

CASES = Path(__file__).parent / "planner_cases.csv"
HELD_OUT_CASES = CASES.with_name("planner_held_out_cases.csv")
"""Runs on which no constant was chosen."""


@dataclass(frozen=True)
class Comparison:
    """A published run and its plan; errors are shares of what was published, None where nothing was."""

    run: Published
    plan: RunPlan

    @property
    def time_error(self) -> float | None:
        return None if self.run.seconds is None else self.plan.time.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.run.memory_gb is None else self.memory_gb / self.run.memory_gb - 1

    @property
    def memory_gb(self) -> float:
        """Return the plan's memory in 10^9 bytes; of tensors alone where the source counts those alone."""
        if self.run.is_theoretical:
            return max(memory.total - memory.residual for memory in self.plan.memories) / 1e9
        return self.plan.memory_bytes / 1e9

    @property
    def parameter_error(self) -> float:
        return self.plan.parameters / 1e9 / self.run.parameters_b - 1


def compare(cases: Path = CASES) -> list[Comparison]:
    """Plan every run of a file."""
    return [Comparison(run, OtherPlan(run.planned_run)) for run in read_published(cases)]


def errors(comparisons: Sequence[Comparison], kind: str) -> list[float]:
    """Return the sizes of the errors of `time`, `memory` or `parameter`, where there are any."""
    found = (getattr(each, f"{kind}_error") for each in comparisons)
    return [abs(error) for error in found if error is not None]


def wrong_verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    """Run that are said to fit and did not, or the other way round."""
    return [each.run.name for each in comparisons if each.plan.fits == each.run.ran_out_of_memory]


def lines(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the table and its summary."""
    yield f"{'run':32}{'s':>9}{'plan':>9}{'error':>7}{'GB':>7}{'plan':>7}{'error':>7}  time goes to"
    for each in comparisons:
        yield _line(each)
    yield ""
    for kind, bound in (("time", 0.25), ("memory", 0.20), ("parameter", 0.005)):
        found = errors(comparisons, kind)
        within = sum(error < bound for error in found)
        share = within / len(found)
        yield f"{kind:10} {len(found)} runs: median error {median(found):.1%}, {share:.1%} within {bound:.1%}"
    sources = dict.fromkeys(each.run.source for each in comparisons)
    for source in sources:
        found = errors([each for each in comparisons if each.run.source == source], "time")
        if found:
            yield f"  time, {len(found):2} of {source}: median {median(found):.1%}, worst {max(found):.1%}"
    verdicts = wrong_verdicts(comparisons)
    yield f"wrong about fitting: {', '.join(verdicts) or 'none'}"


def _line(each: Comparison) -> str:
    time = each.plan.time
    parts = {**time.work._asdict(), "bubble": time.waiting}
    told = " ".join(
        f"{name} {value / time.seconds:.0%}" for name, value in parts.items() if value > time.seconds / 50
    )
    memory = f"{_number(each.run.memory_gb, 7)}{each.memory_gb:7.1f}{_share(each.memory_error)}"
    seconds = f"{_number(each.run.seconds)}{time.seconds:9.2f}{_share(each.time_error)}"
    return f"{each.run.name:32}{seconds}{memory}  {told}"


def _number(value: float | None, width: int = 9) -> str:
    return " " * width if value is None else f"{value:{width}.{2 if width == 9 else 1}f}"


def _share(value: float | None) -> str:
    return " " * 7 if value is None else f"{value:+7.1%}"


def main() -> None:
    """Read the flags and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, default=CASES)
    print("\n".join(lines(compare(parser.parse_args().cases))))


if __name__ == "__main__":
    main()
