#!/usr/bin/env python
"""Tokens per second of each kind of parallelism on two ranks, as a ratio to torch's own way of it.

python benchmarks/parallel_peers.py --modes tp2,tp2+sp,pp2,dp2,zero2,zero3

    mode               torch's own
    tp2                DTensor tensor parallelism (parallelize_module) with loss_parallel
    tp2+sp             the same with SequenceParallel
    pp2                torch.distributed.pipelining, Schedule1F1B; with a weight for the output of its own
    pp2+interleaved    ScheduleInterleaved1F1B, two chunks a rank; the same
    dp2                DistributedDataParallel
    zero1              DistributedDataParallel with ZeroRedundancyOptimizer
    zero2, zero3       FSDP2 (fully_shard) without and with resharding after each forward

Both sides start from the same weights and read the same samples. Both have one thread a rank, megalite's
setting of the allocator (--no-keep-freed-memory: glibc's own), no dropout, SDPA, fused AdamW and clipping.
Their losses and gradient norms must agree, or the mode fails. They take turns, so that a busy neighbour slows
both; what others used of the machine's cores is printed. In bf16 megalite keeps bf16 weights and fp32 main
weights; torch autocasts fp32 weights, or under FSDP2 gathers them in bf16.

A mode that this megalite has no flags for is skipped. Exit status 1 where a mode failed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch_peers
from rank_turns import ForeignCPU, Ranks
from torch import Tensor

from megalite.config import Config, check_config
from megalite.data.batch_loader import microbatch_samples
from megalite.distributed.local_ranks import RankError, run_ranks
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import parse
from megalite.train.run_context import build_data, resolve_run
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.errors import ConfigError

NUM_RANKS = 2
NUM_WARMUP = 2
ROW = "{:<16} {:>15} {:>12} {:>6} {:>13} {:>9} {:>11}"
BUSY = 0.1
"""Share of the machine's cores in others' hands from which on a turn is no measurement."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
NORM_TOLERANCE = {"fp32": 2e-2, "bf16": 5e-2}
"""torch's CPU norm is up to 1% too small for a tensor of many millions of elements."""


@dataclass(frozen=True)
class Mode:
    """One kind of parallelism on both sides.

    Attributes:
        layout: megalite's flags for it.
        peer: torch's own.
        model: flags of the model that it takes.
    """

    layout: str
    peer: Callable[..., torch_peers.PeerStep]
    model: str = ""


UNTIED = "--untie-embeddings-and-output-weights"  # torch's pipelines know no weight on two stages
INTERLEAVED = "--pp 2 --num-virtual-stages-per-pipeline-rank 2"
MODES = {
    "tp2": Mode("--tp 2", partial(torch_peers.tensor_parallel, sequence_parallel=False)),
    "tp2+sp": Mode(
        "--tp 2 --sequence-parallel", partial(torch_peers.tensor_parallel, sequence_parallel=True)
    ),
    "pp2": Mode("--pp 2", partial(torch_peers.pipeline, num_chunks=1), UNTIED),
    "pp2+interleaved": Mode(INTERLEAVED, partial(torch_peers.pipeline, num_chunks=2), UNTIED),
    "dp2": Mode("--dp 2", partial(torch_peers.ddp, zero1=False)),
    "zero1": Mode("--dp 2 --zero-stage 1", partial(torch_peers.ddp, zero1=True)),
    "zero2": Mode("--dp 2 --zero-stage 2", partial(torch_peers.fsdp, zero3=False)),
    "zero3": Mode("--dp 2 --zero-stage 3", partial(torch_peers.fsdp, zero3=True)),
}


class Round(NamedTuple):
    """A step of both sides.

    Attributes:
        ours, theirs: its seconds, of megalite and of torch.
        our_cpu, their_cpu: CPU seconds of both ranks.
        foreign: the share of the cores that others used meanwhile.
    """

    ours: float
    theirs: float
    our_cpu: float
    their_cpu: float
    foreign: float


class Outcome(NamedTuple):
    """The result of a mode's rounds.

    Attributes:
        ours, theirs: median seconds of a step, of megalite and of torch.
        cpu_ratio: torch's CPU seconds over megalite's, which a busy neighbour changes little.
        ratios: torch's time over megalite's, of each round that counts.
        foreign: the largest share of the cores that others used in a round that counts.
        num_busy: rounds in which others used more than BUSY of the cores.
    """

    ours: float
    theirs: float
    cpu_ratio: float
    ratios: list[float]
    foreign: float
    num_busy: int


def config_of(mode: str, args: argparse.Namespace) -> Config:
    """Return the config of both sides.

    Raises:
        ConfigError: megalite has no such mode, or the numbers do not fit it.
    """
    words = [*_common_flags(mode, args), *MODES[mode].layout.split(), *args.flags.split()]
    if mode == "pp2":
        words += ["--pipeline-layers", *map(str, balanced_layers(args))]
    if args.dtype == "bf16":
        words.append("--bf16")
    if not args.keep_freed_memory:
        words.append("--no-keep-freed-memory")
    config, _ = parse(words)
    check_config(config, NUM_RANKS)
    return config


def _common_flags(mode: str, args: argparse.Namespace) -> list[str]:
    """Return the flags of model and training, which do not depend on the layout."""
    return f"""
        --num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.hidden // 64}
        --seq-length {args.seq_length} --vocab-size {args.vocab_size} --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {args.micro_batch_size} --global-batch-size {args.global_batch_size}
        --train-iters 100000 --eval-iters 0 --mock-data --lr 1e-4 --lr-decay-style constant --num-threads 1
        {MODES[mode].model}
    """.split()


def balanced_layers(args: argparse.Namespace) -> tuple[int, int]:
    """Return the layers of two stages of which the last also computes the logits."""
    layer = 12 * args.hidden**2 + 2 * args.seq_length * args.hidden
    output = args.vocab_size * args.hidden
    first = min(range(1, args.layers), key=lambda n: max(n * layer, (args.layers - n) * layer + output))
    return first, args.layers - first


def build_megalite(topology: Topology, config: Config) -> Callable[[], tuple[float, float]]:
    """Return a step of megalite."""
    trainer = _trainer(topology, config)

    def step() -> tuple[float, float]:
        result = trainer.step()
        return result.loss, result.grad_norm

    return step


def build_peer(
    topology: Topology, config: Config, mode: str, weights: Path
) -> Callable[[], tuple[float, float]]:
    """Return a step of torch on the samples that megalite's takes."""
    dataset = build_data(resolve_run(config, topology)).train
    assert dataset is not None
    peer = MODES[mode].peer(topology, config, torch.load(weights, mmap=True))
    b, dp = config.training.micro_batch_size, topology.dp
    consumed = 0

    def step() -> tuple[float, float]:
        nonlocal consumed
        numbers = [
            number
            for index in range(config.num_microbatches(dp.size))
            for number in microbatch_samples(consumed, index, b, dp.rank, dp.size)
        ]
        text = torch.stack([torch.from_numpy(dataset[int(number)]) for number in numbers])
        consumed += len(numbers) * dp.size
        return peer(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return step


def initial_weights(topology: Topology, config: Config) -> dict[str, Tensor]:
    """Return all of megalite's weights by name, from one rank."""
    chunks = _trainer(topology, config).chunks
    return {name: weight.detach().clone() for chunk in chunks for name, weight in chunk.named_parameters()}


def _trainer(topology: Topology, config: Config) -> Trainer:
    return start_trainer(config, topology)


def measure(mode: str, config: Config, args: argparse.Namespace) -> Outcome:
    """Run both sides turn by turn.

    Raises:
        ValueError: they do not compute the same.
        RankError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        torch.save(_reference_weights(mode, args), weights)
        with (
            Ranks(build_megalite, config.parallel, NUM_RANKS, config) as ours,
            Ranks(build_peer, config.parallel, NUM_RANKS, config, mode, weights) as theirs,
        ):
            rounds = [take_round(ours, theirs, args.dtype) for _ in range(NUM_WARMUP + args.rounds)]
    return outcome_of(rounds[NUM_WARMUP:])


def take_round(ours: Ranks, theirs: Ranks, dtype: str) -> Round:
    """Return one turn of each side."""
    foreign = ForeignCPU()
    turns = [side.turn() for side in (ours, theirs)]
    share = foreign.share(sum(turn.cpu_seconds for turn in turns))
    check_same_work([turn.result for turn in turns], dtype)
    seconds, cpu = ([getattr(turn, name) for turn in turns] for name in ("seconds", "cpu_seconds"))
    return Round(*seconds, *cpu, share)


def outcome_of(rounds: Sequence[Round]) -> Outcome:
    """Return the medians over the quiet rounds, or over all where fewer than three are quiet."""
    quiet = [each for each in rounds if each.foreign <= BUSY]
    counted = quiet if len(quiet) >= min(3, len(rounds)) else rounds
    return Outcome(
        statistics.median(each.ours for each in counted),
        statistics.median(each.theirs for each in counted),
        statistics.median(each.their_cpu / each.our_cpu for each in counted),
        [each.theirs / each.ours for each in counted],
        max(each.foreign for each in counted),
        len(rounds) - len(quiet),
    )


def check_same_work(results: Sequence[tuple[float, float]], dtype: str) -> None:
    """Compare the two sides' loss and gradient norm of one step.

    Raises:
        ValueError: one is not the other's.
    """
    tolerances = (LOSS_TOLERANCE[dtype], NORM_TOLERANCE[dtype])
    for name, ours, theirs, tolerance in zip(("loss", "gradient norm"), *results, tolerances, strict=True):
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            raise ValueError(f"not the same work: megalite's {name} is {ours}, torch's {theirs}")


def _reference_weights(mode: str, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the initial weights of this mode: the same in every layout, so computed on one rank."""
    config, _ = parse(_common_flags(mode, args))
    weights: dict[str, Tensor] = run_ranks(initial_weights, config.parallel.mesh, 1, config)[0]
    return weights


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the model, the batch and what to compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=",".join(MODES), help="names with commas; by default all")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=8192, help="a multiple of 256: no side pads it")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flags", default="", help="further flags of megalite, in one word")
    parser.add_argument("--keep-freed-memory", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(arguments)
    if args.vocab_size % 256:
        parser.error(f"--vocab-size {args.vocab_size}: give a multiple of 256")
    if unknown := [mode for mode in args.modes.split(",") if mode not in MODES]:
        parser.error(f"--modes {','.join(unknown)}: choose of {','.join(MODES)}")
    return args


def print_outcome(mode: str, outcome: Outcome, num_tokens: int) -> None:
    """Print a mode's row, and a remark where the machine was busy."""
    ours, theirs = num_tokens / outcome.ours, num_tokens / outcome.theirs
    spread = f"{min(outcome.ratios):.2f} to {max(outcome.ratios):.2f}"
    cells = (
        *(f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}", spread),
        *(f"{outcome.cpu_ratio:.2f}", f"{outcome.foreign:.0%}"),
    )
    print(ROW.format(mode, *cells), flush=True)
    if outcome.num_busy:
        counted = (
            "; they are left out" if outcome.foreign <= BUSY else " and count all the same: measure again"
        )
        print(f"  in {outcome.num_busy} rounds others had over {BUSY:.0%} of the cores{counted}", flush=True)


def main() -> int:
    """Print a row for each mode."""
    args = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, before their first import of torch
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print(f"torch {torch.__version__}, {NUM_RANKS} ranks of one thread, {vars(args)}")
    print(
        ROW.format("mode", "megalite tok/s", "torch tok/s", "ratio", "of rounds", "CPU ratio", "others' CPU")
    )
    status = 0
    for mode in args.modes.split(","):
        try:
            outcome = measure(mode, config_of(mode, args), args)
        except ConfigError as error:
            print(f"{mode:<16} skipped: {' '.join(str(error).split())}", flush=True)
        except (ValueError, RankError) as error:
            print(f"{mode:<16} FAILED: {error}", flush=True)
            status = 1
        else:
            print_outcome(mode, outcome, args.global_batch_size * args.seq_length)
    return status


if __name__ == "__main__":
    sys.exit(main())
