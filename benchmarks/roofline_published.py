#!/usr/bin/env python
"""Compare the roofline with published runs of GPTs on one node, without tensor or pipeline parallelism.

python -m benchmarks.roofline_published

The programs are not megalite, and their replicas communicate, which the roofline does not count: the ratio
shows how far such programs stay below it. A micro-batch that was not published is 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.planner import CASES, HELD_OUT_CASES
from benchmarks.published_runs import Published, read_published
from benchmarks.roofline import mfu, predicted_mfu


def comparable(run: Published) -> bool:
    """Return whether a run trains a GPT on one node of Ampere or newer, without recomputation."""
    planned = run.planned_run
    return (
        run.seconds is not None
        and planned.tp == planned.pp == planned.cp == planned.cluster.num_nodes == 1
        and planned.config.model.activation == "gelu"
        and planned.config.recompute.recompute_granularity is None
        and planned.cluster.gpu.tflops >= 312
    )


def shares(run: Published) -> tuple[float, float]:
    """Return the published MFU and the roofline's, both by our count of FLOPs."""
    planned = run.planned_run
    model, size, gpu = planned.config.model, planned.config.training.micro_batch_size, planned.cluster.gpu
    assert run.seconds is not None
    published = mfu(model, size, gpu, run.seconds / planned.num_microbatches)
    return published, predicted_mfu(model, size, gpu, planned.num_microbatches)


def lines(runs: Sequence[Published]) -> Iterator[str]:
    """Yield a line for each run."""
    yield f"{'run':24} {'TFLOP/s':>8} {'h':>5} {'batch':>5} {'published':>10} {'roofline':>9} {'ratio':>6}"
    for run in runs:
        planned, (published, expected) = run.planned_run, shares(run)
        batch = planned.config.training.micro_batch_size
        yield (
            f"{run.name:24} {planned.cluster.gpu.tflops:8.0f} {planned.config.model.hidden_size:5} {batch:5} "
            f"{published:10.1%} {expected:9.1%} {published / expected:6.2f}"
        )
    for tflops in sorted({run.planned_run.cluster.gpu.tflops for run in runs}):
        found = [shares(run) for run in runs if run.planned_run.cluster.gpu.tflops == tflops]
        ratio = median(published / expected for published, expected in found)
        yield f"median ratio of {len(found)} runs at {tflops:.0f} TFLOP/s: {ratio:.2f}"


def compared_runs() -> list[Published]:
    """Return the runs of both files that can be compared."""
    return [run for cases in (CASES, HELD_OUT_CASES) for run in read_published(cases) if comparable(run)]


def main() -> None:
    """Print the table."""
    print("\n".join(lines(compared_runs())))


if __name__ == "__main__":
    main()
