#!/usr/bin/env python
"""Compare the planner with papers that were not used to choose its constants.

PYTHONPATH=. python benchmarks/planner_held_out.py

Leaves out one source at a time: three shares of a kind of GPU (products, attention, links) are chosen on
the other sources' runs of that kind, and the left-out runs are planned with them. A few minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median

from benchmarks.other_programs import time_of
from benchmarks.planner import CASES
from benchmarks.published_runs import Published, read_published

FACTORS = (0.80, 0.88, 0.95, 1.0, 1.05, 1.12, 1.25)
"""By which each share may be changed."""
SHARES = ("product_share", "attention_share", "link_share")
CAP = 0.35
"""Errors count as no larger when the shares are chosen: a run of another nature moves nothing."""
Choice = tuple[float, ...]


@cache
def _error(run: Published, choice: Choice) -> float:
    assert run.seconds is not None
    gpu = run.planned_run.cluster.gpu
    shares = {name: getattr(gpu, name) * factor for name, factor in zip(SHARES, choice, strict=True)}
    cluster = replace(run.planned_run.cluster, gpu=replace(gpu, **shares))
    return abs(time_of(replace(run.planned_run, cluster=cluster)).seconds / run.seconds - 1)


def _loss(runs: Sequence[Published], choice: Choice) -> float:
    """Mean error, in which a source with many runs counts as the root of their number."""
    counts = Counter(run.source for run in runs)
    weights = [counts[run.source] ** -0.5 for run in runs]
    errors = [min(_error(run, choice), CAP) for run in runs]
    return sum(weight * error for weight, error in zip(weights, errors, strict=True)) / sum(weights)


def _chosen(runs: Sequence[Published]) -> Choice:
    """Return one share after the other, and the first again."""
    choice: Choice = (1.0,) * len(SHARES)
    for place in (*range(len(SHARES)), 0) if runs else ():
        tries = [(*choice[:place], factor, *choice[place + 1 :]) for factor in FACTORS]
        choice = min(tries, key=lambda each: _loss(runs, each))
    return choice


def main() -> None:
    """Print a line a source and kind of GPU, and what all left-out runs come to."""
    runs = [run for run in read_published(CASES) if run.seconds is not None]
    every: list[float] = []
    kinds = dict.fromkeys((run.source, run.planned_run.cluster.gpu.tflops) for run in runs)
    for source, tflops in kinds:
        same_kind = [run for run in runs if run.planned_run.cluster.gpu.tflops == tflops]
        choice = _chosen([run for run in same_kind if run.source != source])
        errors = [_error(run, choice) for run in same_kind if run.source == source]
        every += errors
        told = f"median {median(errors):.1%}, worst {max(errors):.1%}"
        print(f"{len(errors):3} runs, {tflops:.0f} TFLOP/s, {source[:60]:60} {told}")
    share = sum(error < 0.25 for error in every) / len(every)
    print(f"held out: {len(every)} runs, median error {median(every):.1%}, {share:.1%} within 25%")


if __name__ == "__main__":
    main()
