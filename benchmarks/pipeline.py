#!/usr/bin/env python
"""How much time the pipeline's schedules leave unused, and what the executor itself costs.

python benchmarks/pipeline.py [--ranks 4] [--microbatches 8]

The first table runs each schedule on ranks whose stages sleep in place of computing, so that the cores do not
matter, and compares the time that the ranks wait with the papers' formulas. The second runs a tiny layer with
the executor and without, and tells the difference for each action, in the thread's processor time: neighbours
that keep the machine busy do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.pipeline.executor import Pipeline, PointToPoint
from megalite.pipeline.schedules import SCHEDULES
from megalite.tensor_parallel.gemm import WeightGradientStore

FORWARD_MS = 100.0
"""A rank's forward of one microbatch, over all of its chunks; the backward takes twice as long."""
SHAPE = (4, 8)
CHUNKS = 2
BUBBLES: dict[str, Callable[[int, int], float]] = {
    "gpipe": lambda p, m: (p - 1) / m,
    "1f1b": lambda p, m: (p - 1) / m,
    "interleaved": lambda p, m: (p - 1) / (CHUNKS * m),
    "zb-h1": lambda p, m: (p - 1) / (3 * m),
    "zb-v": lambda p, m: (p - 1) / (6 * m),
}
"""Time of waiting over time of work (Narayanan et al. 2021; Qi et al. 2023)."""


class Sleep(torch.autograd.Function):
    """Takes its time forward and backward, the weight's part apart where the schedule has it so."""

    @staticmethod
    def forward(ctx, hidden, seconds, store, weight, busy):
        ctx.rest = seconds, store, weight, busy
        doze(seconds, busy)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        seconds, store, weight, busy = ctx.rest
        doze(seconds, busy)
        if store is not None:
            store.put(weight, lambda: doze(seconds, busy))
        else:
            doze(seconds, busy)
        return gradient, None, None, None, None


def doze(seconds: float, busy: list[float]) -> Tensor:
    """Sleeps, and notes for how long it was."""
    start = time.perf_counter()
    time.sleep(seconds)
    busy.append(time.perf_counter() - start)
    return torch.zeros(())


class Sleeper:
    """A stage that only takes time."""

    def __init__(
        self, is_last: bool, seconds: float, store: WeightGradientStore | None, busy: list[float]
    ) -> None:
        self.is_last, self.seconds, self.store, self.busy = is_last, seconds, store, busy
        self.weight = nn.Parameter(torch.zeros(()))

    def __call__(self, microbatch: Tensor, hidden: Tensor | None) -> Tensor:
        x = microbatch.clone().requires_grad_() if hidden is None else hidden
        x = Sleep.apply(x, self.seconds, self.store, self.weight, self.busy)
        return x.sum() if self.is_last else x


def waiting(topology: Topology, schedule: str, num_microbatches: int) -> float:
    """Return the seconds of waiting for each second of work, over all ranks, in the best of three steps."""
    stages = SCHEDULES[schedule].stage_map(topology.pp.size, CHUNKS)
    store = WeightGradientStore() if SCHEDULES[schedule].splits_backward else None
    busy: list[float] = []
    seconds = FORWARD_MS / 1000 / stages.num_chunks
    own = stages.stages_of(topology.pp.rank)
    chunks = [Sleeper(stage == stages.num_stages - 1, seconds, store, busy) for stage in own]
    exchange = PointToPoint(topology.pp, torch.float32, topology.device)
    pipeline = Pipeline(chunks, exchange, schedule, store)
    ratios = []
    for _ in range(3):
        busy.clear()
        dist.barrier()
        start = time.perf_counter()
        pipeline.train_step(num_microbatches, lambda number: torch.zeros(SHAPE), SHAPE)
        dist.barrier()
        both = torch.tensor([time.perf_counter() - start, sum(busy)], dtype=torch.float64)
        dist.all_reduce(both)
        ratios.append((both[0] / both[1]).item() - 1)
    return min(ratios)


class Tiny:
    """A stage of one small layer."""

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.layer = nn.Linear(SHAPE[1], SHAPE[1])

    def __call__(self, microbatch: Tensor, hidden: Tensor | None) -> Tensor:
        x = self.layer(microbatch if hidden is None else hidden)
        return x.sum() if self.is_last else x


def processor_time(work: Callable[[], object], repeats: int) -> float:
    """Least processor time of this thread, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def overhead(topology: Topology, schedule: str, num_microbatches: int) -> float:
    """Return the microseconds of the executor for each action of this rank, messages included."""
    stages = SCHEDULES[schedule].stage_map(topology.pp.size, CHUNKS)
    own = stages.stages_of(topology.pp.rank)
    chunks = [Tiny(stage == stages.num_stages - 1) for stage in own]
    exchange = PointToPoint(topology.pp, torch.float32, topology.device)
    pipeline = Pipeline(chunks, exchange, schedule)
    microbatch = torch.zeros(SHAPE)

    def plain() -> None:
        for _ in range(num_microbatches):
            for chunk, stage in zip(chunks, own, strict=True):
                hidden = None if stage == 0 else torch.zeros(SHAPE).requires_grad_()
                output = chunk(microbatch, hidden)
                torch.autograd.backward(output, None if chunk.is_last else torch.zeros(SHAPE))

    def piped() -> None:
        pipeline.train_step(num_microbatches, lambda number: microbatch, SHAPE)

    num_actions = len(SCHEDULES[schedule].train(topology.pp.rank, stages, num_microbatches))
    difference = processor_time(piped, 20) - processor_time(plain, 20)
    return 1e6 * difference / num_actions


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    flags = parser.parse_args()
    p, m = flags.ranks, flags.microbatches
    parallel = ParallelConfig(pipeline_model_parallel_size=p)
    print(f"waiting / work on {p} ranks, {m} microbatches, stages that sleep")
    print(f"{'schedule':<12} {'measured':>9} {'formula':>9} {'points':>7}")
    for schedule, formula in BUBBLES.items():
        measured = run_ranks(waiting, parallel.mesh, p, schedule, m)[0]
        expected = formula(p, m)
        points = 100 * (measured - expected)
        print(f"{schedule:<12} {measured:>9.1%} {expected:>9.1%} {points:>+7.1f}", flush=True)
    print("\nmicroseconds of the executor an action, a layer of 8 x 8")
    print(f"{'schedule':<12} {'one rank':>9} {'two ranks, with messages':>25}")
    for schedule in ("1f1b", "interleaved"):
        alone = run_ranks(overhead, ParallelConfig().mesh, 1, schedule, 16)[0]
        pair = ParallelConfig(pipeline_model_parallel_size=2)
        each = run_ranks(overhead, pair.mesh, 2, schedule, 16)
        print(f"{schedule:<12} {alone:>9.0f} {max(each):>25.0f}", flush=True)


if __name__ == "__main__":
    main()
