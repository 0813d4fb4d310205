#!/usr/bin/env python
"""Time context parallelism of each --cp-comm-type on CPU ranks, as ratios to torch's ring attention.

python benchmarks/context_parallel.py --lengths 2048 4096 8192 16384 32768 --heads 2 1 64

Attention alone runs, forward and backward: causal, in fp32, from each rank's queries, keys and values to
their gradients. torch's ring attention has slices in the same zigzag order. It is private, has no entry for
the CPU's kernel, and gets that kernel from here. Two ranks run all types but a2a+p2p, which needs four: two
groups of two. The types of a row take turns. The first ratio is of medians over the rounds, of the slowest
rank. The second one, in brackets, is of the busiest rank's time on the CPU without waiting, on which other
jobs have little effect. A core for each rank shows what a type gains; with fewer, they run in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import truediv
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.attention.choice import build_core
from megalite.config import ModelConfig, ParallelConfig
from megalite.config.parallel import CP_COMM_PROPERTIES
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.kernels import Drop
from megalite.tensor_parallel.parameter_spec import LayerContext

Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TYPES_BY_RANKS = {2: ("all_gather", "a2a", "p2p"), 4: ("a2a+p2p",)}
PEER = "torch"
TIMEOUT = 3600.0  # seconds of a row: other jobs may slow it down


class Case(NamedTuple):
    """Describes the attention of a row.

    Attributes:
        s: tokens of the sample.
        heads: query heads, n.
        groups: key/value heads, g.
        size: size of a head, d.
    """

    s: int
    heads: int
    groups: int
    size: int


def of_type(topology: Topology, kind: str, case: Case) -> Run:
    """Return forward and backward of one of our types, from ``[s/cp, b, n, d]`` to gradients."""
    config = ModelConfig(
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        hidden_size=case.heads * case.size,
        seq_length=case.s,
        attention_dropout=0.0,
    )
    topology = replace(
        topology, is_zigzag=CP_COMM_PROPERTIES[kind].is_zigzag
    )  # as in a run of this type alone
    context = LayerContext(topology, torch.float32, cp_comm_type=kind)
    core = build_core(config, context)
    layer = core.for_layer(0, core.config.head_specs[0])
    visible = core.visible_keys((1, case.s), None, [None])[None]

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
        arguments = (x.permute(1, 2, 0, 3) for x in layer.enter(q, k, v))
        y = layer(*arguments, visible, Drop(0.0, 0, torch.zeros(1, dtype=torch.int64)))
        out = layer.leave(y.permute(2, 0, 1, 3))
        torch.autograd.grad(out, (q, k, v), grad)
        return out.detach()

    return run


def of_torch(topology: Topology) -> Run:
    """Return forward and backward of torch's ring attention with the CPU's kernel."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    group, dim, aten = topology.position_ranks.group, 2, torch.ops.aten  # the dim of positions
    theirs._cp_options.enable_load_balance = True
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
        copies = q.shape[2] // k.shape[2]
        q, grad = (x.permute(1, 2, 0, 3) for x in (q.detach(), grad))
        k, v = (x.detach().permute(1, 2, 0, 3).repeat_interleave(copies, dim=1) for x in (k, v))
        out, sums, *_ = theirs._templated_ring_attention(group, dim, forward, q, k, v, is_causal=True)
        theirs._templated_ring_attention_backward(
            group, dim, backward, grad, "grad_out", q, k, v, out, sums, is_causal=True, dropout_p=0.0
        )
        return out.permute(2, 0, 1, 3)

    return run


def time_types(
    topology: Topology, kinds: Sequence[str], case: Case, num_rounds: int
) -> dict[str, tuple[float, float]]:
    """Return medians over the rounds, by type: seconds, and seconds of this rank on the CPU."""
    ranks = topology.position_ranks
    runs = {kind: of_type(topology, kind, case) for kind in kinds} | {PEER: of_torch(topology)}
    shape = case.s // ranks.size, 1
    heads = case.heads, case.groups, case.groups
    q, k, v = (torch.randn(*shape, n, case.size, requires_grad=True) for n in heads)
    grad = torch.randn(*shape, case.heads, case.size)
    expected = runs[PEER](q, k, v, grad)  # in zigzag order
    for kind in kinds:  # these runs also warm up
        found = runs[kind](q, k, v, grad)
        if CP_COMM_PROPERTIES[kind].is_zigzag:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    rounds = [
        {name: _seconds(run, (q, k, v, grad), ranks.group) for name, run in runs.items()}
        for _ in range(num_rounds)
    ]
    return {
        name: (
            statistics.median(each[name][0] for each in rounds),
            statistics.median(each[name][1] for each in rounds),
        )
        for name in runs
    }


def _seconds(run: Run, tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Return the seconds of a run that all ranks start and end together, and those on the CPU."""
    dist.barrier(group)
    start, start_of_cpu = time.perf_counter(), time.process_time()
    run(*tensors)
    dist.barrier(group)
    return time.perf_counter() - start, time.process_time() - start_of_cpu


def measure(kinds: Sequence[str], num_ranks: int, case: Case, num_rounds: int) -> dict[str, list[float]]:
    """Return what `time_types` returns, of the slowest rank and of the busiest one."""
    levels = any(CP_COMM_PROPERTIES[kind].has_levels for kind in kinds)
    mesh = ParallelConfig(
        context_parallel_size=num_ranks,
        cp_comm_type="a2a+p2p" if levels else "p2p",
        hierarchical_context_parallel_sizes=(2, num_ranks // 2) if levels else None,
    ).mesh
    ranks = run_ranks(time_types, mesh, num_ranks, kinds, case, num_rounds, timeout=TIMEOUT)
    return {name: [max(each[name][i] for each in ranks) for i in range(2)] for name in ranks[0]}


def main() -> None:
    """Print a table: milliseconds of torch's ring, and the ratio of its time to that of each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=list(TYPES_BY_RANKS))
    parser.add_argument("--heads", type=int, nargs=3, default=[8, 2, 64], help="query, key/value heads, size")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    columns = [kind for num_ranks in options.ranks for kind in TYPES_BY_RANKS[num_ranks]]
    print("tokens ranks  torch, ms" + "".join(f"{kind:>15}" for kind in columns))
    for s in options.lengths:
        for num_ranks in options.ranks:
            seconds = measure(TYPES_BY_RANKS[num_ranks], num_ranks, Case(s, *options.heads), options.rounds)
            ratios = {
                kind: "{:.2f} ({:.2f})".format(*map(truediv, seconds[PEER], seconds[kind]))
                for kind in seconds
            }
            cells = "".join(f"{ratios.get(kind, ''):>15}" for kind in columns)
            print(f"{s:6} {num_ranks:5} {seconds[PEER][0] * 1e3:10.0f}{cells}", flush=True)


if __name__ == "__main__":
    main()
