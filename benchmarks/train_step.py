#!/usr/bin/env python
"""Tokens per second, model TFLOP/s, MFU and memory of one rank of megalite, and its ratio to plain PyTorch.

python benchmarks/train_step.py --hidden 512 --layers 6 --threads 1
python benchmarks/train_step.py --model gpt-1.3b

A step is the whole of it: a batch of random tokens, forward, backward, clipping, AdamW. TFLOP/s count the
model's products of matrices alone, causal attention halved, nothing for recomputation; `of it` is their
share of what a large product of matrices reaches in the same run, MFU their share of the GPU's data sheet.
Plain PyTorch is what a careful user writes without megalite: nn.Linear, nn.LayerNorm, F.cross_entropy,
scaled_dot_product_attention, fused AdamW, clip_grad_norm_; in bf16 under autocast, with weights in fp32.
Each trains in its own process, turn by turn, so that a busy neighbour slows both, and figures are of the
median step; where memory is for one of them, they run one after the other. `by CPU` is the ratio of the
processes' own seconds, which a neighbour changes less. GB is the most that a process has taken, of the GPU
where there is one.

`bloom-20b-slice` is one of the 8 tensor-parallel ranks of a 20-billion BLOOM, without the other 7: nothing is
sent, so that its losses mean nothing, and its time is that of the computation alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from arithmetic import SIZES, product, product_flops
from fits import check_fits, free_bytes, largest_micro_batch, plain_step_bytes, step_bytes
from named_models import MODELS, add_flags, config_of, like, named_model
from one_rank_peers import as_others_run, is_plain, megalite, plain
from turns import Build, Measured, take_turns

from megalite import kernels
from megalite.config import Config
from megalite.config.model.model_config import CONVENTION, flops_per_token
from megalite.utils.commands import run_main
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import peak_tflops

HEADS = (
    "dropout",
    "megalite",
    "plain",
    "ratio",
    "by CPU",
    "TFLOP/s",
    "product",
    "of it",
    "MFU",
    "GB",
    "plain GB",
)
UNITS = ("", "tok/s", "tok/s", "", "", "", "TFLOP/s", "", "", "", "")
ROW = "{:>7} {:>10} {:>10} {:>6} {:>6} {:>8} {:>8} {:>6} {:>6} {:>6} {:>9}"


class Machine(NamedTuple):
    """What the steps run on.

    Attributes:
        peak: dense bf16 TFLOP/s of the data sheet; None where there is none.
        free: bytes of memory.
    """

    device_type: str
    name: str
    peak: float | None
    free: float

    @staticmethod
    def here() -> Machine:
        """Return this machine: its first GPU, or its CPU."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return Machine(device.type, name, peak_tflops(device), free_bytes(device.type))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the model, its batch, and what is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--dropout", type=float, nargs="+", help="by default 0; of `small` 0 and 0.1")
    parser.add_argument("--no-plain", action="store_true", help="leave plain PyTorch out")
    args = parser.parse_args(arguments)
    args.dropout = args.dropout or ([0.0, 0.1] if args.model == "small" else [0.0])
    return args


def config_that_fits(args: argparse.Namespace, dropout: float, machine: Machine) -> Config:
    """Return the step that is timed.

    Raises:
        UserError: it does not fit into memory; with what would.
    """
    named = named_model(args, dropout)
    of_size = partial(config_of, named, args)
    size = args.micro_batch_size or (2 if args.model == "small" else None)
    config = of_size(size or largest_micro_batch(of_size, machine.device_type, machine.free))
    others = ((name, config_of(like(name, config.model), args, 1)) for name in MODELS if name != args.model)
    check_fits(args.model, config, others, machine.device_type, machine.free)
    return config


def works(config: Config, args: argparse.Namespace, machine: Machine) -> dict[str, tuple[Build, Config]]:
    """Return the programs that take turns; print why plain PyTorch does not."""
    found: dict[str, tuple[Build, Config]] = {"megalite": (megalite, config), "product": (product, config)}
    needed = plain_step_bytes(config, machine.device_type)
    if args.no_plain:
        return found
    if config.parallel.tp > 1 or not is_plain(config.model):
        tell_left_out("plain PyTorch", "benchmarks/plain_gpt.py is a whole GPT-2 alone")
    elif needed > machine.free:
        sizes = f"{needed / 1e9:.1f} GB by the plan, and {machine.free / 1e9:.1f} GB are free"
        tell_left_out("plain PyTorch", f"it needs {sizes}")
    else:
        found["plain"] = (plain, as_others_run(config))
    return found


def fit_together(config: Config, machine: Machine) -> bool:
    """Return whether both steps have room beside each other; else one runs after the other."""
    needed = [size(config, machine.device_type) for size in (step_bytes, plain_step_bytes)]
    return sum(needed) <= machine.free


def tell_left_out(name: str, reason: str) -> None:
    """Print what did not run."""
    print(f"{name} is skipped: {reason}", flush=True)


def row(dropout: float, config: Config, machine: Machine, measured: dict[str, Measured]) -> str:
    """Return a table row for a step."""
    tp, ours, theirs = config.parallel.tp, measured["megalite"], measured.get("plain")
    num_tokens = config.training.micro_batch_size * config.num_microbatches(1) * config.model.seq_length
    rate = num_tokens / ours.median
    tflops = rate * flops_per_token(config.model, tp) / tp / 1e12
    product_tflops = product_flops(machine.device_type) / measured["product"].median / 1e12
    return ROW.format(
        f"{dropout:.1f}",
        f"{rate:.0f}",
        f"{num_tokens / theirs.median:.0f}" if theirs else "-",
        f"{theirs.median / ours.median:.2f}" if theirs else "-",
        f"{theirs.cpu_median / ours.cpu_median:.2f}" if theirs else "-",
        f"{tflops:.3g}",
        f"{product_tflops:.3g}",
        f"{tflops / product_tflops:.1%}",
        f"{tflops / machine.peak:.1%}" if machine.peak and config.model.params_dtype == "bf16" else "-",
        f"{ours.peak_bytes / 1e9:.1f}",
        f"{theirs.peak_bytes / 1e9:.1f}" if theirs else "-",
    )


def lines_before(args: argparse.Namespace, config: Config, machine: Machine) -> Sequence[str]:
    """Return lines about the model, the machine and the units."""
    model, tp = config.model, config.parallel.tp
    size, peak = SIZES[machine.device_type][0], machine.peak
    lines = [
        f"torch {torch.__version__}, {machine.name}, {args.threads} thread(s), {args.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}",
        f"kernels: {kernels.describe(machine.device_type)}",
        f"{args.model}: {model.num_layers} layers, h {model.hidden_size}, {model.num_attention_heads} heads, "
        f"s {model.seq_length}, vocabulary {model.vocab_size}, {model.params_dtype}; {args.microbatches} "
        f"microbatch(es) of {config.training.micro_batch_size}{f'; {args.flags}' if args.flags else ''}",
        f"TFLOP/s: {CONVENTION}; the product is of {size} x {size} in {model.params_dtype}; "
        + (
            f"MFU: of {peak:.0f} TFLOP/s by the data sheet"
            if peak
            else "no MFU: no data sheet is known for it"
        ),
    ]
    if tp > 1:
        lines.append(f"rank 0 of {tp}, alone: collectives of the others do nothing, and take no time")
    return lines


def main(arguments: Sequence[str]) -> None:
    """Print a row for each probability of dropout."""
    args, machine = parse_arguments(arguments), Machine.here()
    args.params_dtype = args.params_dtype or ("bf16" if machine.device_type == "cuda" else "fp32")
    configs = {dropout: config_that_fits(args, dropout, machine) for dropout in args.dropout}
    print(*lines_before(args, configs[args.dropout[0]], machine), sep="\n")
    plans = {dropout: (config, works(config, args, machine)) for dropout, config in configs.items()}
    print(ROW.format(*HEADS), ROW.format(*UNITS).rstrip(), sep="\n", flush=True)
    for dropout, (config, builds) in plans.items():
        measured = take_turns(builds, args.rounds, tell_left_out, together=fit_together(config, machine))
        if not {"megalite", "product"} <= measured.keys():
            raise UserError("nothing was measured: see above which programs were skipped, and why")
        print(row(dropout, config, machine, measured), flush=True)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
