"""Time all-reduce on all ranks.

torchrun --nproc-per-node N -m benchmarks.gpu_check.all_reduce DEVICE [small] [share]
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology

SIZES = (1, 16, 256, 1024)
"""Megabytes."""


def main(device: str, *options: str) -> None:
    """Print a line of JSON for each size: on rank 0, of the median of 20 calls."""
    sizes, num_calls = ((1,), 3) if "small" in options else (SIZES[:2] if "share" in options else SIZES, 20)
    backend = "gloo" if device == "cpu" else "auto"
    parallel = ParallelConfig(distributed_backend=backend, ranks_share_gpus="share" in options)
    with Topology.start(parallel.mesh, Launch.from_environment()) as topology:
        n = topology.world_size
        for megabytes in sizes:
            x = torch.zeros(megabytes * 500_000, dtype=torch.bfloat16, device=topology.device)
            taken = []
            for _ in range(3 + num_calls):
                dist.barrier()
                start = _now(topology.device)
                dist.all_reduce(x)
                taken.append(_now(topology.device) - start)
            seconds = statistics.median(taken[3:])
            rate = 2 * (n - 1) / n * x.numel() * 2 / seconds
            if topology.rank == 0:
                row = {"megabytes": megabytes, "bus_gbps": rate / 1e9, "milliseconds": 1e3 * seconds}
                print(json.dumps(row), flush=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:])
