#!/usr/bin/env python
"""Says which corpus, document, offset and text each sample of a past iteration came from.

python tools/where.py --iteration 1200 --config run.yaml

Takes the flags of the run, all that pretrain_gpt.py knows; the number of ranks does not matter. With the
run's --dp it says too which data-parallel rank took a sample.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from megalite.cli import parse, run_main
from megalite.cli.tool import ToolParser
from megalite.data.origin import Origin
from megalite.data.tokenizer import Tokenizer
from megalite.train.prepare import tokenizer_of
from megalite.train.where import TracedSample, trace_iteration


def main(arguments: Sequence[str]) -> None:
    """Reads the tool's own flags, leaves the rest to the config, and prints the samples."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--iteration", type=int, required=True, help="as the log counts, from 1")
    parser.add_argument("--chars", type=int, default=72, help="of text shown for each piece (default 72)")
    own, rest = parser.parse_known_args(arguments)
    config, _ = parse(rest)
    tokenizer = None if config.data.resolved_tokenizer_type is None else tokenizer_of(config)
    for sample in trace_iteration(config, own.iteration):
        print(_heading(sample))
        for origin in sample.origins:
            print(f"  {_place(origin)}: {_text(origin, tokenizer, own.chars)}")


def _heading(sample: TracedSample) -> str:
    rank = "" if sample.dp_rank is None else f" (dp rank {sample.dp_rank}, microbatch {sample.microbatch})"
    return f"sample {sample.number}{rank}"


def _place(origin: Origin) -> str:
    sequence = "" if origin.sequence == origin.document else f" sequence {origin.sequence}"
    return (
        f"{origin.prefix} document {origin.document}{sequence} "
        f"tokens {origin.offset} to {origin.offset + len(origin.tokens) - 1}"
    )


def _text(origin: Origin, tokenizer: Tokenizer | None, num_chars: int) -> str:
    """The beginning of a piece on one line; its token ids where there is no tokenizer."""
    ids = origin.tokens[: num_chars + 1].tolist()  # a token is a character at least, as a rule
    text = repr(tokenizer.decode(ids))[1:-1] if tokenizer else " ".join(map(str, ids))
    return text if len(text) <= num_chars else f"{text[:num_chars]}…"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without a word
    run_main(main, sys.argv[1:])
