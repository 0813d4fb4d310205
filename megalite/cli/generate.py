"""Continue prompts with a trained model.

megalite generate --load runs/quickstart/checkpoints --prompt "In the beginning"

Model and tokenizer are those of the checkpoint's config; a checkpoint of any layout can be loaded. A single
sample of a single prompt is printed while it is generated, others when their batch is complete. Under
torchrun, layers are sharded over --tp ranks, and prompts are distributed over the replicas. The text is the
same in any layout and batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from megalite.config.tool_parser import ToolParser, positive_int
from megalite.distributed.topology import Topology
from megalite.generate.completions import CompletionWriter
from megalite.generate.generator import Generator, Prompt
from megalite.generate.prompts import prompts_of, read_prompts
from megalite.generate.sampling import Sampler, Sampling
from megalite.generate.trained_model import (
    ModelFlags,
    end_of_document,
    load_model,
    open_trained,
    start_ranks,
    tokenizer_of,
)
from megalite.log import log
from megalite.model.kv_cache import CachedCore


def main(arguments: Sequence[str]) -> None:
    """Load the model, and print the text after each prompt."""
    flags = _flags(arguments)
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
    model_flags = ModelFlags.of(flags)
    with start_ranks(model_flags, vars(flags)) as topology:
        trained = open_trained(model_flags, topology)
        tokenizer = tokenizer_of(trained, model_flags, topology)
        texts = _texts(flags, topology)
        prompts = prompts_of(texts, tokenizer, trained.config.model, flags.max_new_tokens)
        stage = load_model(trained, topology, CachedCore)
        sampler = Sampler(sampling, trained.vocab_size, topology.tp)
        generator = Generator(stage, sampler, None if flags.ignore_eod else end_of_document(tokenizer))
        writer = CompletionWriter(generator, tokenizer, topology, flags.batch_size)
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
        help='one prompt per line, or in a .jsonl file one {"prompt": ...} per line; - for standard input',
    )
    text = parser.add_argument_group("the text")
    text.add_argument(
        "--max-new-tokens",
        type=positive_int,
        help="largest number of new tokens (default 128, or the positions that are left)",
    )
    text.add_argument("--num-samples", type=positive_int, default=1, help="texts per prompt (default 1)")
    text.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="divisor of the logits; 0 chooses the likeliest token (default 1)",
    )
    text.add_argument(
        "--top-k", type=int, default=0, help="sample from the K likeliest tokens (default 0: all)"
    )
    text.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens with this total probability (default 1: all)",
    )
    text.add_argument("--seed", type=int, default=1234, help="seed of the sampling (default 1234)")
    text.add_argument("--ignore-eod", action="store_true", help="continue after the end of a document")
    text.add_argument("--json", action="store_true", help="print one JSON object per text")
    text.add_argument("--batch-size", type=positive_int, default=8, help="prompts per batch (default 8)")
    ModelFlags.add_to(parser)
    return parser.parse_args(arguments)


def _texts(flags: argparse.Namespace, topology: Topology) -> list[str]:
    """Read the prompts on the first rank; all ranks return them."""
    read: list[list[str]] = [[]]
    with topology.agreed():
        if topology.rank == 0:
            read = [read_prompts(flags.prompt, flags.prompt_file)]
    dist.broadcast_object_list(read, src=0)
    return read[0]


def _stream(writer: CompletionWriter, text: str, prompt: Prompt) -> int:
    """Print the prompt, and the text after it while it is generated; return the number of new tokens."""
    _put(text, writer.topology)
    for piece in writer.stream(prompt):
        _put(piece, writer.topology)
    _put("\n", writer.topology)
    return writer.generator.num_tokens


def _write_all(
    writer: CompletionWriter, texts: Sequence[str], prompts: Sequence[Prompt], flags: argparse.Namespace
) -> int:
    """Print each text with its prompt when its batch is complete; return the number of new tokens."""
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
