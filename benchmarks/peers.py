#!/usr/bin/env python
"""One training step of the same model and batch in megalite and in its peers, turn by turn.

python benchmarks/peers.py
python benchmarks/peers.py --params-dtype bf16

    megalite        its own step
    plain           PyTorch's own modules: nn.Linear, scaled_dot_product_attention, fused AdamW
    compiled        the same, model and loss under torch.compile
    transformers    Hugging Face's model of the family, with scaled_dot_product_attention
    megatron        megatron-core's GPTModel, of Transformer Engine's layers where it imports, else its own

All begin with the same weights and take the same random tokens; the losses of every step must agree where
nothing is dropped, and the numbers of parameters always, or the run fails: then it would not be the same
training. Each has a process of its own; where memory is not for all of them, they run one after the other. A
ratio is a peer's seconds over megalite's, of the medians: above 1 megalite is faster. The CPU ratio is of
the processes' own seconds, which busy neighbours change less. In bf16 megalite and megatron-core have
weights in bf16 and main weights in fp32, the others autocast weights in fp32. megalite tells glibc to keep
freed memory; with --same-allocator all do.

What cannot run here is named with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from fits import check_fits, free_bytes, plain_step_bytes, step_bytes
from megatron_peer import megatron
from named_models import add_flags, config_of, named_model
from one_rank_peers import as_others_run, compiled, megalite, plain, transformers
from turns import Build, Measured, take_turns

from megalite.config import Config
from megalite.utils.commands import run_main
from megalite.utils.errors import UserError

PEERS: dict[str, Build] = {
    "megalite": megalite,
    "plain": plain,
    "compiled": compiled,
    "transformers": transformers,
    "megatron": megatron,
}
PACKAGES = ("torch", "transformers", "megatron-core", "transformer-engine")
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative tolerance of the loss of a step without dropout."""
HEADS = ("", "tok/s", "ratio", "of rounds", "CPU ratio", "GB", "parameters", "first loss", "last loss")
ROW = "{:<14} {:>8} {:>6} {:>14} {:>9} {:>6} {:>12} {:>11} {:>10}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the model, its batch, and who takes part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--peers", default=",".join(PEERS), help="names with commas; by default all")
    parser.add_argument("--same-allocator", action="store_true", help="glibc keeps freed memory for all")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.peers.split(",") if name not in PEERS]:
        parser.error(f"--peers {','.join(unknown)}: choose of {','.join(PEERS)}")
    args.params_dtype = args.params_dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    return args


def check_same_training(measured: dict[str, Measured], dtype: str, dropout: float) -> None:
    """Compare everybody's number of parameters and losses with megalite's.

    Raises:
        UserError: one trained something else.
    """
    ours = measured["megalite"]
    for name, theirs in measured.items():
        if theirs.num_parameters != ours.num_parameters:
            raise UserError(
                f"not the same model: {name} has {theirs.num_parameters:,} parameters, megalite "
                f"{ours.num_parameters:,}"
            )
        for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
            if dropout == 0 and not abs(a - b) <= TOLERANCE[dtype] * abs(b):
                raise UserError(f"not the same training: in step {step} megalite's loss is {a}, {name}'s {b}")


def row(name: str, theirs: Measured, ours: Measured, num_tokens: int) -> str:
    """Return a table row for a peer's steps."""
    ratios = [a / b for a, b in zip(theirs.seconds, ours.seconds, strict=True)]
    return ROW.format(
        name,
        f"{num_tokens / theirs.median:.0f}",
        f"{theirs.median / ours.median:.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{theirs.cpu_median / ours.cpu_median:.2f}",
        f"{theirs.peak_bytes / 1e9:.1f}",
        f"{theirs.num_parameters:,}",
        f"{theirs.losses[0]:.5f}",
        f"{theirs.losses[-1]:.5f}",
    )


def results_row(measured: dict[str, Measured], dtype: str, dropout: float) -> str:
    """Return the ratios as a row of the table that benchmarks/chart.py draws."""
    ours = measured["megalite"].median
    cells = (
        f"{measured[name].median / ours:.2f}" if name in measured else "-"
        for name in PEERS
        if name != "megalite"
    )
    return f"| {dtype}{f', dropout {dropout}' if dropout else ''} | {' | '.join(cells)} |"


def versions() -> str:
    """Return the versions of the installed peers' packages."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def config_for(args: argparse.Namespace, device_type: str) -> Config:
    """Return the training of all.

    Raises:
        UserError: it does not fit into memory, or has a model that is cut over ranks.
    """
    named = named_model(args, args.dropout)
    if named.tp > 1:
        raise UserError(f"--model {args.model} is one rank's part of a model: peers have whole models alone")
    config = config_of(named, args, args.micro_batch_size or (2 if args.model == "small" else 1))
    check_fits(args.model, config, (), device_type, free_bytes(device_type))
    return config


def main(arguments: Sequence[str]) -> None:
    """Print a row for each peer that runs."""
    args = parse_arguments(arguments)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    config = config_for(args, device_type)
    others = config if args.same_allocator else as_others_run(config)
    model, size = config.model, config.training.micro_batch_size
    print(f"{versions()}; {device_type}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}")
    print(
        f"{args.model}: {model.num_layers} layers, h {model.hidden_size}, s {model.seq_length}, vocabulary "
        f"{model.vocab_size}, {model.params_dtype}, dropout {args.dropout}; {args.microbatches} "
        f"microbatch(es) of {size}; {args.rounds} rounds",
        flush=True,
    )
    names = {"megalite": None} | dict.fromkeys(args.peers.split(","))
    builds = {name: (PEERS[name], config if name == "megalite" else others) for name in names}
    left_out: dict[str, str] = {}
    needed = len(builds) * max(size(config, device_type) for size in (step_bytes, plain_step_bytes))
    together = needed <= free_bytes(device_type)
    if not together:
        print(f"one after the other: together they need {needed / 1e9:.0f} GB by the plan", flush=True)
    measured = take_turns(builds, args.rounds, left_out.__setitem__, together=together)
    if "megalite" not in measured:
        raise UserError(f"megalite did not run: {left_out['megalite']}")
    print(ROW.format(*HEADS))
    for name, theirs in measured.items():
        num_tokens = size * args.microbatches * model.seq_length
        print(row(name, theirs, measured["megalite"], num_tokens))
    for name, reason in left_out.items():
        print(f"{name} is skipped: {reason}")
    check_same_training(measured, model.params_dtype, args.dropout)
    print("for RESULTS.md:", results_row(measured, model.params_dtype, args.dropout))
    print(f"the same {'model' if args.dropout else 'losses in every step'}")


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
