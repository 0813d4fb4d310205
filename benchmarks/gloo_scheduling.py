"""Time small all-reduces of gloo ranks that share cores, as batch work and by Linux's default policy."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology

NUMBER = 300
"""all-reduces of a turn"""


def _set_policy(policy: int) -> None:
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def _microseconds(tensor: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(NUMBER):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / NUMBER * 1e6


def times(topology: Topology, numel: int, rounds: int) -> list[tuple[float, float]]:
    """Return microseconds of an fp32 all-reduce in each round: as batch work, and by the default policy."""
    tensor, found = torch.ones(numel), []
    for _ in range(rounds):
        turn = []
        for policy in (os.SCHED_BATCH, os.SCHED_OTHER):
            _set_policy(policy)
            turn.append(_microseconds(tensor))
        found.append((turn[0], turn[1]))
    return found


def main() -> None:
    """Print the medians, and the ratio of the two in each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=1000, help="elements of a tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = run_ranks(times, ParallelConfig().mesh, options.ranks, options.numel, options.rounds)[0]
    batch, default = (statistics.median(each) for each in zip(*found, strict=True))
    ratios = sorted(other / own for own, other in found)
    print(
        f"batch {batch:.0f} us, default {default:.0f} us, "
        f"default / batch {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
    )


if __name__ == "__main__":
    main()
