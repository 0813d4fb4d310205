#!/usr/bin/env python
"""Tells the loss and the perplexity of text under a trained model.

python tools/evaluate.py --load runs/quickstart/checkpoints --split valid

The model and its tokenizer are those that the checkpoint's config names; any layout's checkpoint is loaded.
Under torchrun, --tp ranks share each layer, and other ranks share the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, positive_int
from megalite.data.tokenizer_digest import check_tokenizer
from megalite.errors import UserError
from megalite.generation.evaluate import (
    Reading,
    Result,
    evaluate_corpus,
    evaluate_split,
    evaluate_texts,
)
from megalite.generation.flags import ModelFlags
from megalite.generation.trained import Trained, open_trained, started, tokenizer_of
from megalite.topology import Topology


def main(arguments: Sequence[str]) -> None:
    """Reads the flags, and prints a line for each thing that is evaluated on."""
    flags = _flags(arguments)
    model_flags = ModelFlags.of(flags)
    with started(model_flags, vars(flags)) as topology:
        trained = open_trained(model_flags, topology)
        for result in _results(flags, model_flags, trained, topology):
            if topology.rank == 0:
                print(_json(result, trained) if flags.json else _line(result), flush=True)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", nargs="+", help="files of UTF-8 text, each a document; - for standard input")
    what.add_argument("--data-path", help="prefix of a .bin/.idx pair, all of which is read")
    what.add_argument(
        "--split", choices=("valid", "test"), help="of the run's own data, as training evaluates it"
    )
    reading = parser.add_argument_group("how it is read")
    reading.add_argument("--seq-length", type=positive_int, help="tokens of a window (default the run's)")
    reading.add_argument(
        "--stride",
        type=positive_int,
        help="tokens from one window to the next: below --seq-length a token has more before it "
        "(default --seq-length)",
    )
    reading.add_argument(
        "--micro-batch-size", type=positive_int, help="windows or samples at a time (default the run's)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    ModelFlags.add_to(parser)
    flags = parser.parse_args(arguments)
    if flags.split and (flags.seq_length or flags.stride):
        raise UserError("--split takes the run's own samples: leave --seq-length and --stride out")
    return flags


def _results(
    flags: argparse.Namespace, model_flags: ModelFlags, trained: Trained, topology: Topology
) -> Iterator[Result]:
    """Evaluates what is asked for."""
    if flags.split:
        yield from evaluate_split(
            trained, flags.split, model_flags.parallel, flags.micro_batch_size, topology
        )
        return
    config = trained.config
    seq_length = flags.seq_length or config.model.seq_length
    batch_size = flags.micro_batch_size or config.training.micro_batch_size
    reading = Reading(seq_length, flags.stride or seq_length, batch_size)
    if flags.text:
        tokenizer = tokenizer_of(trained, model_flags, topology)
        yield from evaluate_texts(trained, _texts(flags.text, topology), tokenizer, reading, topology)
        return
    if (model_flags.tokenizer or config.data).resolved_tokenizer_type is not None:
        tokenizer = tokenizer_of(trained, model_flags, topology)
        with topology.agreed():
            check_tokenizer([flags.data_path], tokenizer)
    yield evaluate_corpus(trained, flags.data_path, reading, topology)


def _texts(paths: Sequence[str], topology: Topology) -> dict[str, str]:
    """The files' texts by name, read by the first rank for all."""
    read: list[dict[str, str]] = [{}]
    with topology.agreed():
        if topology.rank == 0:
            read = [{path: _read(path) for path in paths}]
    dist.broadcast_object_list(read, src=0)
    return read[0]


def _read(path: str) -> str:
    try:
        return (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        raise UserError(f"--text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--text {path} is not UTF-8") from None


def _line(result: Result) -> str:
    tokens = "" if result.num_tokens is None else f" | tokens: {result.num_tokens:,}"
    bits = "" if result.bits_per_byte is None else f" | bits per byte: {result.bits_per_byte:.4f}"
    return f"{result.name} | lm loss: {result.loss:.6E} | perplexity: {result.perplexity:.6E}{tokens}{bits}"


def _json(result: Result, trained: Trained) -> str:
    return json.dumps(
        {
            "iteration": trained.iteration,
            "perplexity": result.perplexity,
            **dataclasses.asdict(result),
        },
        ensure_ascii=False,
    )


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
