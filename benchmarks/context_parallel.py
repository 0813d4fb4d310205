#!/usr/bin/env python
"""Time the ways of context parallelism on CPU ranks, as ratios to torch's own ring attention in the same run.

python benchmarks/context_parallel.py --lengths 2048 4096 8192

Attention alone runs, forward and backward: causal, in fp32, from each rank's queries, keys and values to
their gradients. torch's ring attention has slices in the same zigzag order. It is private, has no entry for
the CPU's kernel, and gets that kernel from here. The ways run turn by turn, and each figure is the median of
the rounds of the slowest rank. With --cpu-time it is the busiest rank's time on the CPU without waiting, on
which other jobs have little effect.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.axes import MeshOptions
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.kernels import Drop
from megalite.model.attention_backends import build_core
from megalite.model.context_parallel import KEY_ACCESS
from megalite.tensor_parallel.parameter_spec import LayerContext

Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
WAYS = ("all_gather", "a2a", "p2p")
PEER = "torch"


def way(topology: Topology, kind: str, s: int, heads: int, groups: int, size: int) -> Run:
    """Return forward and backward of one of our ways, from ``[s/cp, b, n, d]`` to gradients."""
    config = ModelConfig(
        num_attention_heads=heads,
        num_query_groups=groups,
        hidden_size=heads * size,
        seq_length=s,
        attention_dropout=0.0,
    )
    context = LayerContext(topology, torch.float32, cp_comm_type=kind)
    core, access, cp = build_core(config, context), KEY_ACCESS[kind], context.cp
    visible = core.visible_keys((1, s), None, [None])[None]

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
        arguments = (x.permute(1, 2, 0, 3) for x in access.enter(q, k, v, cp))
        y = core(*arguments, visible, Drop(0.0, 0, torch.zeros(1, dtype=torch.int64)))
        out = access.leave(y.permute(2, 0, 1, 3), cp)
        torch.autograd.grad(out, (q, k, v), grad)
        return out.detach()

    return run


def of_torch(topology: Topology) -> Run:
    """Return forward and backward of torch's ring attention with the CPU's kernel."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    group, aten = topology.position_ranks.group, torch.ops.aten
    theirs._cp_options.enable_load_balance = True
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
        copies = q.shape[2] // k.shape[2]
        q, grad = (x.permute(1, 2, 0, 3) for x in (q.detach(), grad))
        k, v = (x.detach().permute(1, 2, 0, 3).repeat_interleave(copies, dim=1) for x in (k, v))
        out, sums, *_ = theirs._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        theirs._templated_ring_attention_backward(
            group, 2, backward, grad, "grad_out", q, k, v, out, sums, is_causal=True, dropout_p=0.0
        )
        return out.permute(2, 0, 1, 3)

    return run


def time_ways(
    topology: Topology, s: int, heads: int, groups: int, size: int, rounds: int, of_cpu: bool
) -> dict[str, list[float]]:
    """Return the seconds of each round, by way; all ranks start a round together."""
    now = time.process_time if of_cpu else time.perf_counter
    ranks = topology.position_ranks
    runs = {kind: way(topology, kind, s, heads, groups, size) for kind in WAYS}
    runs[PEER] = of_torch(topology)
    shape = s // ranks.size, 1
    q, k, v = (torch.randn(*shape, n, size, requires_grad=True) for n in (heads, groups, groups))
    grad, seconds = torch.randn(*shape, heads, size), {name: list[float]() for name in runs}
    ring, theirs = (runs[name](q, k, v, grad) for name in ("p2p", PEER))
    torch.testing.assert_close(ring, theirs, rtol=1e-5, atol=1e-6)  # both have the zigzag order
    for number in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier(ranks.group)
            start = now()
            run(q, k, v, grad)
            dist.barrier(ranks.group)
            if number:  # the first one warms up
                seconds[name].append(now() - start)
    return seconds


def main() -> None:
    """Print a table: milliseconds of torch's ring, and the ratio of its time to that of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, nargs=3, default=[8, 2, 64], help="query, key/value heads, size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="measure the busiest rank's CPU time")
    options = parser.parse_args()
    print("tokens  torch, ms" + "".join(f"{kind:>12}" for kind in WAYS))
    for s in options.lengths:
        mesh = MeshOptions({"cp": options.ranks, "dp": 1}, is_zigzag=True)
        case = s, *options.heads, options.rounds, options.cpu_time
        measure = partial(run_ranks, time_ways, mesh, options.ranks, *case)
        ranks = measure()
        seconds = {name: max(statistics.median(each[name]) for each in ranks) for name in ranks[0]}
        ratios = "".join(f"{seconds[PEER] / seconds[kind]:12.2f}" for kind in WAYS)
        print(f"{s:6} {seconds[PEER] * 1e3:10.0f}{ratios}", flush=True)


if __name__ == "__main__":
    main()
