#!/usr/bin/env python
"""Compare gathered tokens with an all-to-all of rows, by the number of a token's experts, over a 1-Gbit link.

sudo python benchmarks/expert_dispatch.py

Two ranks with `--ep 2` run forward and backward of one layer in network namespaces, as in `overlap.py`, with
both dispatchers in turns. A line is a number of experts of a token: the median seconds of the slower rank
with each dispatcher, and the median and the range of the rounds' ratios. Experts are narrower if a token has
more of them, so that all lines compute the same. Needs root, ip and tc (iproute2).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import torch
from expert_overlap import seconds_of
from overlap import layer_parser, run_over_slow_link

from megalite.config import ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.expert_dispatch import AllGatherDispatcher, AllToAllDispatcher
from megalite.model.experts import MixtureOfExperts, Router
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext

NUM_EXPERTS = 16
TOPK = (1, 2, 4, 8)


def block_of(args: argparse.Namespace, topk: int, context: LayerContext) -> MixtureOfExperts:
    """Return a layer with so many experts of a token."""
    model = replace(
        PRESETS["llama-tiny"],
        hidden_size=args.hidden,
        num_experts=NUM_EXPERTS,
        moe_router_topk=topk,
        moe_ffn_hidden_size=args.width // topk,
    )
    block = MixtureOfExperts(model, context, Router(model, context))
    initialize(block, 1, context.topology)
    return block


def run_rank(args: argparse.Namespace) -> None:
    """Time both dispatchers in turns; rank 0 prints a line for each number of experts of a token."""
    parallel = ParallelConfig(expert_model_parallel_size=2)
    with Topology.start(parallel.mesh, Launch.from_environment()) as topology:
        torch.set_num_threads(1)
        context = LayerContext(topology, torch.float32)
        dispatchers = [kind(NUM_EXPERTS, context) for kind in (AllGatherDispatcher, AllToAllDispatcher)]
        x = torch.randn(args.tokens, 1, args.hidden, requires_grad=True)
        for topk in TOPK:
            block, rounds = block_of(args, topk, context), []
            for _ in range(args.rounds + 1):
                seconds = []
                for block.dispatcher in dispatchers:
                    seconds.append(seconds_of(block, x, args.steps))
                rounds.append(seconds)
            gathered, exchanged = zip(*rounds[1:], strict=True)  # the first round warms up
            ratios = sorted(one / other for one, other in zip(gathered, exchanged, strict=True))
            if topology.rank == 0:
                print(
                    f"{topk} experts of a token: {statistics.median(gathered):.3f} s gathered, "
                    f"{statistics.median(exchanged):.3f} s all-to-all, ratio {statistics.median(ratios):.2f} "
                    f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                    flush=True,
                )


def main() -> int:
    """Make the link, and run both ranks."""
    parser = layer_parser(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of a token's experts together")
    return run_over_slow_link(parser, __file__, run_rank)


if __name__ == "__main__":
    sys.exit(main())
