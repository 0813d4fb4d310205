#!/usr/bin/env python
"""Time a mixture of experts, forward and backward, as ratio to an MLP with as many active weights.

python benchmarks/moe.py --threads 1
python benchmarks/moe.py    # on a GPU: in bf16, at sizes of published models

The MLP is as wide as the experts of a token together, so both have the same GEMM FLOPs apart from the router.
`loop` is a plain loop over the experts with the same weights, as in transformers' eager experts. The blocks
run turn by turn, and each figure is the median of its rounds. With one thread, times are the process' CPU
time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from clock import Clock
from torch import Tensor
from torch.nn import Parameter

from megalite.config import ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.experts import MixtureOfExperts, Router
from megalite.model.mlp import MLP
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.hardware import process_settings

SHAPES = (
    (2048, 512, 8, 2, 1024),
    (2048, 512, 16, 4, 512),
    (2048, 512, 64, 8, 256),
    (1024, 1024, 8, 2, 2048),
)
"""Tokens, hidden size, experts, experts of a token, width of an expert."""
SHAPES_ON_GPU = (
    (16384, 4096, 8, 2, 14336),
    (16384, 2048, 64, 8, 1024),
    (16384, 2048, 128, 8, 768),
)
"""The same of Mixtral 8x7B, OLMoE and Qwen 3 30B-A3B."""
Run = Callable[[Tensor], Tensor]


def loop_over_experts(block: MixtureOfExperts) -> Run:
    """Return a function that computes the block expert by expert."""

    def run(x: Tensor) -> Tensor:
        weights, experts, _ = block.router(x)
        tokens, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        weights, experts = weights.flatten(0, 1), experts.flatten(0, 1)
        for number in range(block.router.num_experts):
            token, place = torch.where(experts == number)
            gate, up = F.linear(tokens[token], block.up.weight[number].flatten(0, 1)).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, block.down.weight[number])
            out = out.index_add(0, token, y * weights[token, place, None])
        return out.view_as(x)

    return run


def runs_of(
    shape: tuple[int, ...], topology: Topology, dtype: torch.dtype
) -> dict[str, tuple[Run, list[Parameter]]]:
    """Return the functions to compare, each with its weights; the first is the baseline."""
    _, hidden, experts, topk, width = shape
    model = replace(
        PRESETS["llama-tiny"],
        hidden_size=hidden,
        ffn_hidden_size=topk * width,
        num_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=width,
    )
    context = LayerContext(topology, dtype)
    dense, block = MLP(model, context), MixtureOfExperts(model, context, Router(model, context))
    for each in (dense, block):
        initialize(each, 1, topology)
    return {
        "dense": (lambda x: dense(x).x, [*dense.parameters()]),
        "experts": (lambda x: block(x).x, [*block.parameters()]),
        "loop": (loop_over_experts(block), [*block.parameters()]),
    }


def main() -> None:
    """Time all shapes and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with Topology.start(ParallelConfig().mesh, Launch.from_environment()) as topology:
        process_settings.limit_threads(args.threads, 1)
        is_cuda = topology.device.type == "cuda"
        dtype = torch.bfloat16 if is_cuda else torch.float32
        clock = Clock(topology.device, by_process=args.threads == 1)
        print("tokens hidden experts of a token width      dense   experts      loop")
        for shape in SHAPES_ON_GPU if is_cuda else SHAPES:
            runs = runs_of(shape, topology, dtype)
            kind = {"device": topology.device, "dtype": dtype}
            x, grad = (torch.randn(shape[0], 1, shape[1], **kind) for _ in range(2))
            x.requires_grad_()
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(args.rounds + 1):
                for name, (run, weights) in runs.items():
                    clock.start()
                    first = clock.mark()
                    torch.autograd.grad(run(x), [x, *weights], grad)
                    seconds[name].append(clock.seconds(first, clock.mark()))
            medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
            ratios = "".join(f"{medians[name] / medians['dense']:10.2f}" for name in ("experts", "loop"))
            sizes = "{:6} {:6} {:7} {:10} {:5}".format(*shape)
            print(f"{sizes} {medians['dense'] * 1e3:8.1f} ms{ratios}")


if __name__ == "__main__":
    main()
