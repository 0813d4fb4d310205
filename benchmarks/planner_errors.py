#!/usr/bin/env python
"""Collect the errors of plans of published runs, from which `megalite plan` has its 80% intervals.

PYTHONPATH=. python benchmarks/planner_errors.py > megalite/plan/errors.json

The runs are the open half of published_rows.csv, which has no memory and few dense models in 16 bits, and the
older ones of planner_cases.csv, planner_held_out_cases.csv and planner_expert_cases.csv. The blind half is in
none of them. A setting is a model in a precision on a GPU. Its releases are alike, so that all settings have
the same weight. A kind of run with fewer than `FEWEST` settings has the interval of all runs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from benchmarks import planner, planner_experts, planner_published
from benchmarks.published_rows import OPEN, read_rows
from megalite.plan.uncertainty import OTHER, ErrorRange, kind_of_run

FEWEST = 4
"""Settings of a kind of run that has an interval of its own."""


class Error(NamedTuple):
    """Error of a plan, and the setting of its run."""

    kind: str
    setting: Hashable
    error: float


def new_errors(comparisons: Iterable[planner_published.Comparison]) -> Iterator[Error]:
    """Yield the errors of planned times of 2025 and 2026."""
    for each in comparisons:
        if each.plan is not None:
            yield Error(each.kind, planner_published.setting_of(each.row), each.error)


def expert_errors() -> Iterator[Error]:
    """Yield the errors of planned times of models with experts and of long samples, in 16 bits."""
    for each in planner_experts.compare():
        run = each.plan.run
        setting = run.cluster.gpu, each.plan.parameters, run.config.model.seq_length
        yield Error(kind_of_run(run, each.plan.time), setting, each.error)


def old_errors(quantity: Literal["time", "memory"]) -> Iterator[Error]:
    """Yield the errors of the planned times or memories of older runs."""
    for each in chain(planner.compare(planner.CASES), planner.compare(planner.HELD_OUT_CASES)):
        error = getattr(each, f"{quantity}_error")
        if error is not None:
            run = each.plan.run
            setting = each.run.source, run.cluster.gpu, each.run.parameters_b
            yield Error(kind_of_run(run, each.plan.time), setting, error)


def error_ranges(errors: Sequence[Error]) -> dict[str, ErrorRange]:
    """Return by kind of run the range of errors that a new setting has with a probability of 80%.

    It is as likely to be in each of the n + 1 gaps between the sorted errors of n settings. With fewer than
    9, the range is that of all errors, whose probability is (n - 1) / (n + 1).
    """
    by_kind: Mapping[str, list[Error]] = defaultdict(list)
    for each in errors:
        by_kind[each.kind].append(each)
        by_kind[OTHER].append(each)
    found = {}
    for kind, of_kind in sorted(by_kind.items()):
        counts = Counter(each.setting for each in of_kind)
        if len(counts) >= FEWEST:
            weighted = sorted((each.error, 1 / counts[each.setting]) for each in of_kind)
            outside = 0.1 * (1 + len(counts))
            found[kind] = ErrorRange(
                _within(weighted, outside), _within(weighted[::-1], outside), len(counts)
            )
    return found


def _within(weighted: Sequence[tuple[float, float]], outside: float) -> float:
    """Return the last value until which the sum of the weights is at most `outside`; else the first one."""
    sums = accumulate(weight for _, weight in weighted)
    within = [value for (value, _), total in zip(weighted, sums, strict=True) if total <= outside + 1e-9]
    return within[-1] if within else weighted[0][0]


def collect(comparisons: Iterable[planner_published.Comparison]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the content of the file.

    Args:
        comparisons: of the open half.
    """
    errors = {
        "time": [*new_errors(comparisons), *expert_errors(), *old_errors("time")],
        "memory": list(old_errors("memory")),
    }
    return {
        quantity: {
            kind: {name: round(value, 4) for name, value in each._asdict().items()}
            for kind, each in error_ranges(of_quantity).items()
        }
        for quantity, of_quantity in errors.items()
    }


def main() -> None:
    """Print the file."""
    print(json.dumps(collect(planner_published.compare(read_rows(OPEN))), indent=2))


if __name__ == "__main__":
    main()
