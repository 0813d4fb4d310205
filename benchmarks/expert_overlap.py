#!/usr/bin/env python
"""Compare a shared expert under the messages of the other experts with one after them, over a 1-Gbit link.

sudo python benchmarks/expert_overlap.py

Two ranks with `--ep 2` run forward and backward of one layer in network namespaces, as in `overlap.py`. In
the turns without overlap, the layer waits for rows as soon as they are on their way. A line is a round:
seconds of the slower rank with and without overlap, and their ratio. Needs root, ip and tc (iproute2).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from overlap import layer_parser, run_over_slow_link
from torch import Tensor

from megalite.config import ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.expert_dispatch import AllToAllDispatcher, Dispatched
from megalite.model.experts import MixtureOfExperts, Router
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext


class WaitingDispatcher(AllToAllDispatcher):
    """Waits for the rows at once, so that nothing is computed meanwhile."""

    def start(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None = None
    ) -> Callable[[], Dispatched]:
        dispatched = super().start(x, weights, experts, capacity_factor)()
        return lambda: dispatched


def seconds_of(block: MixtureOfExperts, x: Tensor, steps: int) -> float:
    """Return the seconds of a forward and a backward on the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        torch.autograd.grad(block(x).x.sum(), [x, *block.parameters()])
    seconds = torch.tensor([(time.perf_counter() - start) / steps])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def run_rank(args: argparse.Namespace) -> None:
    """Time both dispatchers in turns; rank 0 prints the rounds."""
    model = replace(
        PRESETS["llama-tiny"],
        hidden_size=args.hidden,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=args.width,
        moe_shared_expert_intermediate_size=args.shared_width,
    )
    parallel = ParallelConfig(expert_model_parallel_size=2)
    with Topology.start(parallel.mesh, Launch.from_environment()) as topology:
        torch.set_num_threads(1)
        context = LayerContext(topology, torch.float32)
        block = MixtureOfExperts(model, context, Router(model, context))
        initialize(block, 1, topology)
        x = torch.randn(args.tokens, 1, args.hidden, requires_grad=True)
        dispatchers = AllToAllDispatcher(8, context), WaitingDispatcher(8, context)
        ratios = []
        for number in range(args.rounds + 1):
            seconds = []
            for block.dispatcher in dispatchers:
                seconds.append(seconds_of(block, x, args.steps))
            if number and topology.rank == 0:  # the first round warms up
                ratios.append(seconds[0] / seconds[1])
                print(f"{seconds[0]:8.3f} s with, {seconds[1]:8.3f} s without: {ratios[-1]:.2f}", flush=True)
        if ratios:
            print(f"median ratio {statistics.median(ratios):.2f}")


def main() -> int:
    """Make the link, and run both ranks."""
    parser = layer_parser(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of an expert")
    parser.add_argument("--shared-width", type=int, default=1024, help="of the shared expert")
    return run_over_slow_link(parser, __file__, run_rank)


if __name__ == "__main__":
    sys.exit(main())
