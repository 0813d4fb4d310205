#!/usr/bin/env python
"""Rates of the offloaded optimizer's update: in memory against torch's AdamW, in a file against the disk.

python benchmarks/offload.py --folder /scratch
python benchmarks/offload.py --elements 500000000 --threads 16 --folder /local_nvme

Each round does all of them in turns, so that a busy neighbour slows them all; a ratio is the median of the
rounds' ratios. Nothing is timed on a GPU: weights and gradients are in host memory too.

- `flat`: torch's fused AdamW on one flat tensor in fp32.
- `ranges`: the same elements in the ranges of the offloaded update, without the copies to and from a device.
- `update`: the whole offloaded update of bf16 weights. The CPU makes its copies; a GPU's engines would.
- `disk`: threads that read and write a file directly (O_DIRECT), as much as the update does, and do nothing
  else.
- `file`: the update with its state in a file: it reads, checks, updates and writes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.topology import Topology
from megalite.kernels import adamw_
from megalite.optim.adamw import MOMENTS
from megalite.optim.offload import OffloadedUpdate, OptimizerOffload
from megalite.optim.state_storage import NUM_THREADS, FileStorage, StateSize

KINDS = ("main", *MOMENTS)
UPDATE_BYTES = 28
"""Bytes per element of an update in fp32: gradient, weight and moments are read, and the latter written."""
BUCKET = 40_000_000
"""Elements of a gradient bucket."""


def main() -> None:
    """Print the rates and their ratios."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology:
        memory, file = (_offload(options.elements, folder, topology) for folder in (None, options.folder))
        work = {
            "flat": _flat(options.elements),
            "ranges": _ranges(memory),
            "update": _update(memory, options.elements),
            "disk": _disk(file),
            "file": _update(file, options.elements),
        }
        rounds: list[dict[str, float]] = []
        for number in range(-1, options.rounds):  # the first takes the memory
            seconds = {name: _seconds(each) for name, each in work.items()}
            if number >= 0:
                rounds.append(seconds)
        disk_bytes = file.bytes.read + file.bytes.written
    print(f"{options.elements:,} elements, {torch.get_num_threads()} threads, {options.rounds} rounds")
    for name in work:
        seconds_of = statistics.median(each[name] for each in rounds)
        num_bytes = disk_bytes if name in ("disk", "file") else UPDATE_BYTES * options.elements
        print(f"{name:8}{seconds_of:9.3f} s{num_bytes / seconds_of / 1e9:9.2f} GB/s")
    for name, base in (("ranges", "flat"), ("update", "flat"), ("file", "disk")):
        ratio = statistics.median(each[base] / each[name] for each in rounds)
        print(f"{name} reaches {ratio:.2f} of {base}'s rate")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the update (default: torch's)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    return parser.parse_args()


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _sizes(num_elements: int) -> list[StateSize]:
    numels = [BUCKET] * (num_elements // BUCKET) + [num_elements % BUCKET] * (num_elements % BUCKET > 0)
    return [StateSize(numel, torch.float32, KINDS) for numel in numels]


def _offload(num_elements: int, folder: str | None, topology: Topology) -> OptimizerOffload:
    config = OptimizerConfig(optimizer_cpu_offload=folder is None, optimizer_nvme_offload=folder)
    return OptimizerOffload(_sizes(num_elements), torch.bfloat16, config, ParallelConfig(), topology)


def _update(offload: OptimizerOffload, num_elements: int) -> Callable[[], None]:
    states = [
        OffloadedUpdate(
            torch.randn(size.numel), torch.zeros(size.numel, dtype=torch.bfloat16), 1e-4, 0.1, 1e-8
        )
        for size in _sizes(num_elements)
    ]

    def update() -> None:
        offload.begin()
        if offload.gradients is not None:
            offload.gradients.copy_missing([state.gradient for state in states])
        offload.start_update(states, 1.0)
        offload.finish()

    return update


def _flat(num_elements: int) -> Callable[[], None]:
    tensors = [torch.zeros(num_elements) for _ in KINDS]
    gradient = torch.randn(num_elements)
    return lambda: _adamw(*tensors, gradient)


def _ranges(offload: OptimizerOffload) -> Callable[[], None]:
    storage = offload.storage
    gradients = [torch.randn(size.numel) for size in storage.sizes]

    def update() -> None:
        for number, (state, start, stop) in enumerate(storage.ranges):
            stored = storage.take(number)
            _adamw(*(stored[kind] for kind in KINDS), gradients[state][start:stop])

    return update


@torch.no_grad()
def _adamw(main: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor) -> None:
    adamw_(
        [main],
        [first],
        [second],
        [],
        [gradient],
        number=torch.tensor(1.0),
        divisor=None,
        is_good=torch.tensor(True),
        learning_rate=1e-4,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        epsilon=1e-8,
    )


def _disk(offload: OptimizerOffload) -> Callable[[], None]:
    """Read and write a file of the size of the state, in the pieces and threads of the update."""
    storage = offload.storage
    assert isinstance(storage, FileStorage)
    other = FileStorage(Path(storage.folder), storage.sizes)  # direct, and with space on the disk
    pieces = [part for parts in other._parts for part in parts]

    def move(part: object) -> None:
        assert hasattr(part, "memory")
        content = part.memory.numpy().data
        os.preadv(other._descriptor, [content], part.start)
        os.pwritev(other._descriptor, [content], part.start)

    def run() -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(move, pieces))

    return run


if __name__ == "__main__":
    main()
