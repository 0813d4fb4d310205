#!/usr/bin/env python
"""Compare plans with published runs on H100s: models with experts, and long samples with context parallelism.

PYTHONPATH=. python benchmarks/planner_experts.py

Each run is planned by the flags in its line of planner_expert_cases.csv, as the program of its source.
Nothing was chosen with these runs. A source that published only TFLOP/s counts half of the attention scores.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.other_programs import program_named, request_of
from megalite.config.model.model_config import flops_per_token_by_convention
from megalite.plan.estimate import RunPlan

CASES = Path(__file__).parent / "planner_expert_cases.csv"


class Comparison(NamedTuple):
    """A published run and its plan.

    Attributes:
        seconds: published seconds of an iteration.
    """

    name: str
    plan: RunPlan
    seconds: float

    @property
    def error(self) -> float:
        """Return the error of the planned time."""
        return self.plan.time.seconds / self.seconds - 1


def compare() -> Iterator[Comparison]:
    """Plan every run of the file."""
    with CASES.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            cluster = f"--bf16 --gpu {row['gpu']} --world-size {row['n_gpus']}"
            _, plan = request_of(
                program_named(row["program"]), [*shlex.split(row["flags"]), *cluster.split()]
            )
            yield Comparison(row["case_id"], plan, float(row["iter_time_s"] or 0) or _seconds(row, plan))


def _seconds(row: dict[str, str], plan: RunPlan) -> float:
    """Return the seconds of an iteration with the published TFLOP/s."""
    flops = flops_per_token_by_convention(plan.run.config.model, plan.run.tp)["causal"] * plan.tokens
    return flops / (float(row["tflops_gpu_causal"]) * 1e12 * plan.run.cluster.world_size)


def main() -> None:
    """Print the table."""
    print(f"{'run':28}{'s':>8}{'plan':>8}{'error':>8}{'GB':>7}  time goes to")
    errors = []
    for each in compare():
        time = each.plan.time
        parts = {**time.work._asdict(), "bubble": time.waiting}
        shares = " ".join(
            f"{name} {value / time.seconds:.0%}" for name, value in parts.items() if value > time.seconds / 50
        )
        seconds = f"{each.seconds:8.2f}{time.seconds:8.2f}{each.error:+8.1%}"
        print(f"{each.name:28}{seconds}{each.plan.memory_bytes / 1e9:7.1f}  {shares}")
        errors.append(abs(each.error))
    print(f"median error {median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} runs")


if __name__ == "__main__":
    main()
