#!/usr/bin/env python
"""Compare the planner's goodput with published runs whose interruptions were counted.

PYTHONPATH=. python benchmarks/planner_goodput.py

The time between failures, the checkpoint and the save interval are as published. The rest are the planner's
defaults: 10 minutes from a failure to the load, and spare nodes that are free for 99% of the failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.plan.failing_run import FailingRun, RunTimes, compare_intervals, enough_spares, simulate_runs
from megalite.plan.goodput import NODE_STORAGE_GBPS, REPAIR_DAYS, RESTART_MINUTES

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True)
class Interrupted:
    """A published run and its interruptions.

    Attributes:
        source: where the figures are from.
        gap_days: days between interruptions.
        work_days: days of training without interruptions.
        checkpoint_tb: 10^12 bytes of a checkpoint.
        storage_gbps: GB/s of its storage; None if it was not published.
        interval: seconds between saves; None if it was not published, and the best one is planned.
        goodput: published share of the time that went into training, at least and at most.
    """

    name: str
    source: str
    num_nodes: int
    gap_days: float
    work_days: float
    checkpoint_tb: float
    storage_gbps: float | None
    interval: float | None
    goodput: tuple[float, float]

    @property
    def node_mtbf_days(self) -> float:
        """Return the mean days between failures of one node, for --node-mtbf."""
        return self.gap_days * self.num_nodes

    def failing_run(self, restart_minutes: float = RESTART_MINUTES) -> FailingRun:
        """Return the run with the planner's defaults. A load reads the checkpoint once."""
        gbps = self.storage_gbps or NODE_STORAGE_GBPS * self.num_nodes
        seconds, gap, repair = 1e3 * self.checkpoint_tb / gbps, self.gap_days * _DAY, REPAIR_DAYS * _DAY
        restart = restart_minutes * _MINUTE + seconds
        return FailingRun(gap, seconds, 0.0, restart, repair, enough_spares(gap, repair))

    def planned(self, restart_minutes: float = RESTART_MINUTES) -> RunTimes:
        """Return the simulated runs, with the published save interval or the best one."""
        run = self.failing_run(restart_minutes)
        interval = self.interval or compare_intervals(run, iteration=1.0).best
        return simulate_runs(run, self.work_days * _DAY, interval)


PUBLISHED = (
    # 419 unexpected interruptions in 54 days, more than 90% effective training time. 14 bytes per parameter.
    Interrupted(
        "Llama 3 405B",
        "Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4; storage: section 3.3.1",
        *(2048, 54 / 419, 54 * 0.9, 405e9 * 14 / 1e12, 2000.0, None),
        goodput=(0.90, 1.0),
    ),
    # A GPU dies "every week or so"; 2.3 TB in 40 s, every 100 iterations of 105 s. The 72,681 iterations from
    # 18 March to 28 June 2022 took 102 days. The difference includes evaluation, maintenance and hangs.
    Interrupted(
        "BLOOM 176B",
        "bigscience-workshop/bigscience, train/tr11-176B-ml: chronicles.md, README.md",
        *(48, 7.0, 72681 * 105 / _DAY, 2.3, 2300 / 40, 100 * 105.0),
        goodput=(72681 * 105 / _DAY / 102,) * 2,
    ),
    # About 2 of 124 machines go down every day; 33 days of work on 1,024 GPUs took 2 months on 992, with
    # about 90 restarts, many by hand. Replacing a machine took hours.
    Interrupted(
        "OPT-175B",
        "facebookresearch/metaseq, projects/OPT/chronicles: final_update.md, 27_percent_update.md",
        *(124, 0.5, 33 * 1024 / 992, 1.6, None, None),
        goodput=(33 * 1024 / 992 / 61,) * 2,
    ),
)


def lines() -> Iterator[str]:
    """Yield the planned goodput, with restarts of 10 minutes and of 4 hours, and the published one."""
    yield f"{'':14}{'node MTBF':>10}{'failures':>10}{'planned':>9}{'4h restarts':>13}  published"
    for run in PUBLISHED:
        times, slow = run.planned(), run.planned(restart_minutes=240)
        low, high = run.goodput
        published = f"{low:.0%}" if low == high else f"over {low:.0%}"
        yield (
            f"{run.name:14}{f'{run.node_mtbf_days:.0f}d':>10}{times.failures.mean():10.0f}{times.share('work'):9.1%}"
            f"{slow.share('work'):13.1%}  {published}"
        )


if __name__ == "__main__":
    print("\n".join(lines()))
