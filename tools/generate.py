#!/usr/bin/env python
"""Continues prompts with a trained model.

python tools/generate.py --load runs/quickstart/checkpoints --prompt "In the beginning"

The model and its tokenizer are those that the checkpoint's config names; any layout's checkpoint is loaded.
One prompt with one sample is written as it comes, others when their batch is complete. Under torchrun, --tp
ranks share each layer, and other ranks share the prompts. The text is the same in any layout and batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, positive_int
from megalite.generation.completions import Writer
from megalite.generation.flags import ModelFlags
from megalite.generation.generator import Generator, Prompt
from megalite.generation.prompts import prompts_of, read_prompts
from megalite.generation.sampling import Sampler, Sampling
from megalite.generation.trained import end_of_document, load_model, open_trained, started, tokenizer_of
from megalite.log import log
from megalite.model.cache import CachedCore
from megalite.topology import Topology


def main(arguments: Sequence[str]) -> None:
    """Reads the flags, loads the model and writes what follows the prompts."""
    flags = _flags(arguments)
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
    model_flags = ModelFlags.of(flags)
    with started(model_flags, vars(flags)) as topology:
        trained = open_trained(model_flags, topology)
        tokenizer = tokenizer_of(trained, model_flags, topology)
        texts = _texts(flags, topology)
        prompts = prompts_of(texts, tokenizer, trained.config.model, flags.max_new_tokens)
        stage = load_model(trained, topology, CachedCore)
        sampler = Sampler(sampling, trained.vocab_size, topology.tp)
        generator = Generator(stage, sampler, None if flags.ignore_eod else end_of_document(tokenizer))
        writer = Writer(generator, tokenizer, topology, flags.batch_size)
        start = time.perf_counter()
        if len(prompts) == 1 and flags.num_samples == 1 and not flags.json:
            num_new = _stream(writer, texts[0], prompts[0])
        else:
            num_new = _write_all(writer, texts, prompts, flags)
        seconds = time.perf_counter() - start
        log.info("%d new tokens in %.2f s: %.1f tokens/s", num_new, seconds, num_new / seconds)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="the text to continue; - for all of standard input")
    prompts.add_argument(
        "--prompt-file",
        help='one prompt a line, or in a .jsonl file {"prompt": ...} a line; - for standard input',
    )
    text = parser.add_argument_group("the text")
    text.add_argument("--max-new-tokens", type=positive_int, help="(default 128, or what positions are left)")
    text.add_argument("--num-samples", type=positive_int, default=1, help="texts for each prompt (default 1)")
    text.add_argument(
        "--temperature", type=float, default=1.0, help="0 takes the likeliest token (default 1)"
    )
    text.add_argument("--top-k", type=int, default=0, help="choose among so many tokens (default 0: all)")
    text.add_argument("--top-p", type=float, default=1.0, help="of so much probability (default 1: all)")
    text.add_argument("--seed", type=int, default=1234, help="another one gives other texts (default 1234)")
    text.add_argument("--ignore-eod", action="store_true", help="go on after the end of a document")
    text.add_argument("--json", action="store_true", help="one JSON object a text")
    text.add_argument("--batch-size", type=positive_int, default=8, help="prompts at a time (default 8)")
    ModelFlags.add_to(parser)
    return parser.parse_args(arguments)


def _texts(flags: argparse.Namespace, topology: Topology) -> list[str]:
    """The prompts, read by the first rank for all."""
    read: list[list[str]] = [[]]
    with topology.agreed():
        if topology.rank == 0:
            read = [read_prompts(flags.prompt, flags.prompt_file)]
    dist.broadcast_object_list(read, src=0)
    return read[0]


def _stream(writer: Writer, text: str, prompt: Prompt) -> int:
    """Writes the prompt and the text after it as it comes; gives the number of new tokens."""
    _put(text, writer.topology)
    for piece in writer.stream(prompt):
        _put(piece, writer.topology)
    _put("\n", writer.topology)
    return writer.generator.num_tokens


def _write_all(
    writer: Writer, texts: Sequence[str], prompts: Sequence[Prompt], flags: argparse.Namespace
) -> int:
    """Writes each text with its prompt once its batch is complete; gives the number of new tokens."""
    num_new = 0  # of all replicas
    for completion in writer.complete(prompts, flags.num_samples):
        num_new += len(completion.ids)
        prompt = texts[completion.prompt_number]
        if flags.json:
            line = json.dumps({"prompt": prompt, **dataclasses.asdict(completion)}, ensure_ascii=False)
        else:
            line = (
                f"== prompt {completion.prompt_number}, sample {completion.sample}\n{prompt}{completion.text}"
            )
        _put(f"{line}\n", writer.topology)
    return num_new


def _put(text: str, topology: Topology) -> None:
    if topology.rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without a word
    run_main(main, sys.argv[1:])
