#!/usr/bin/env python
"""Time attention backends, forward and backward, as ratios to PyTorch's scaled_dot_product_attention.

python benchmarks/attention.py --threads 1

Shapes are sequence length, batch, heads and head size; all need about the same work. With one thread, times
are the process' CPU time, which other processes disturb less; with more threads they are wall time, and on a
GPU the GPU's own time. Backends run turn by turn, and each figure is the median of its rounds. `plain` is
code that a careful user writes without a fused kernel: scores, bias, softmax and weights are in memory.
`dropout` is the unfused backend with dropout 0.1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from clock import Clock
from torch import Tensor

from megalite.attention.choice import build_core
from megalite.attention.core import StageCore
from megalite.attention.positions import distance_bias
from megalite.config import ModelConfig, ParallelConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.kernels import Drop
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.hardware import process_settings

SHAPES = (
    (128, 8, 16, 64),
    (256, 4, 16, 64),
    (512, 2, 12, 64),
    (1024, 1, 12, 64),
    (2048, 1, 4, 64),
    (4096, 1, 2, 64),
    (512, 1, 8, 128),
    (2048, 1, 2, 128),
    (512, 1, 2, 448),
    (2048, 1, 1, 448),
)
"""Sequence length, samples, heads, head size."""
KINDS = {"causal": "none", "alibi": "alibi", "packed": "none", "window": "none"}
"""Position embedding of each kind; a window has an eighth of the sequence."""
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(bias: Tensor) -> Run:
    """Return attention with all scores in memory and a precomputed bias."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)
        return torch.softmax(scores.add_(bias), dim=-1) @ v

    return run


def of_core(
    core: StageCore, shape: tuple[int, int], ids: Tensor | None, window: int | None, drop: Drop
) -> Run:
    """Return a core with the visible keys precomputed, as in a stage."""
    (visible,) = core.visible_keys(shape, ids, [window]).values()
    layer = core.for_layer(0, replace(core.config.head_specs[0], window=window))
    return lambda q, k, v: layer(q, k, v, visible, drop)


def runs_of(shape: tuple[int, ...], kind: str, dtype: torch.dtype, topology: Topology) -> dict[str, Run]:
    """Return the functions to compare; the first is the baseline."""
    s, b, n, d = shape
    config = ModelConfig(
        num_attention_heads=n, hidden_size=n * d, seq_length=s, position_embedding_type=KINDS[kind]
    )
    context = LayerContext(topology, dtype)
    ids = None
    if kind == "packed":
        ids = (torch.arange(s, device=topology.device) * 4 // s).expand(b, s)
    numbers = torch.arange(b, device=topology.device)
    nothing, some = Drop(0.0, 1, numbers), Drop(0.1, 1, numbers)
    sdpa, unfused = (build_core(config, context, name) for name in ("fused", "unfused"))
    window = s // 8 if kind == "window" else None
    (visible,) = unfused.visible_keys((b, s), ids, [window]).values()
    hidden = visible.hidden(range(s), range(s), topology.device)
    bias = distance_bias(config, context, s, range(s)).masked_fill(hidden[:, None], -torch.inf)
    return {
        "sdpa": of_core(sdpa, (b, s), ids, window, nothing),
        "unfused": of_core(unfused, (b, s), ids, window, nothing),
        "plain": plain(bias),
        "dropout": of_core(unfused, (b, s), ids, window, some),
    }


def seconds_of(runs: dict[str, Run], qkv: Tensor, grad: Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of a forward and a backward, turn by turn after a round of warm-up."""
    clock = Clock(qkv.device, by_process=torch.get_num_threads() == 1)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            clock.start()
            start = clock.mark()
            q, k, v = (part.squeeze(3).permute(1, 2, 0, 3) for part in qkv.split(1, dim=3))
            run(q, k, v).permute(2, 0, 1, 3).flatten(2).backward(grad)
            taken[name].append(clock.seconds(start, clock.mark()))
    return {name: statistics.median(some[1:]) for name, some in taken.items()}


def rows(args: argparse.Namespace, topology: Topology) -> Iterator[str]:
    """Yield one for each dtype, kind of positions, and shape, as it is measured."""
    for dtype, kind, shape in itertools.product(args.dtypes, args.kinds, SHAPES):
        s, b, n, d = shape
        if args.seq_lengths and s not in args.seq_lengths:
            continue
        qkv, grad = (
            torch.randn(shape, device=topology.device).to(DTYPES[dtype])
            for shape in ((s, b, n, 3, d), (s, b, n * d))
        )
        qkv.requires_grad_()
        runs = runs_of(shape, kind, DTYPES[dtype], topology)
        base, *others = seconds_of(runs, qkv, grad, args.rounds).values()
        ratios = " ".join(f"{other / base:7.2f}" for other in others)
        yield f"{dtype:>5} {kind:>7} {s:5} {b:2} {n:3} {d:4} {base * 1e3:8.1f} {ratios}"


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seq-lengths", nargs="+", type=int, help="of the shapes, only these")
    args = parser.parse_args()
    process_settings.keep_freed_memory()
    with Topology.start(ParallelConfig(num_threads=args.threads).mesh, Launch(0, 1, 0, 1)) as topology:
        torch.set_num_threads(args.threads)
        print(f"torch {torch.__version__}, {args.threads} thread(s); times over sdpa's, smaller is faster")
        print("dtype    kind     s  b   n    d  sdpa ms unfused   plain dropout")
        for row in rows(args, topology):
            print(row, flush=True)


if __name__ == "__main__":
    main()
