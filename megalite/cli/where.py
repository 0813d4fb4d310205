"""Show the corpus, document, offset and text of each sample of an iteration.

megalite where --iteration 1200 --config run.yaml

It takes all flags of megalite train; pass the run's flags. The number of ranks does not matter. With the
run's --dp, it also shows the data-parallel rank of each sample, and for a corpus of megalite prepare the line
of the input file.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.prepare.report import find_source
from megalite.data.tokenizers.tokenizer import Tokenizer, configured_tokenizer
from megalite.frontends.command_line import parse
from megalite.frontends.tool_parser import ToolParser
from megalite.train.trace_sample import SampleSpan, TracedSample, trace_iteration


def main(arguments: Sequence[str]) -> None:
    """Print the samples. Flags that the tool does not know set the config."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--iteration", type=int, required=True, help="number of the iteration in the log")
    parser.add_argument(
        "--chars", type=int, default=72, help="characters of text to show per piece (default 72)"
    )
    own, rest = parser.parse_known_args(arguments)
    config, _ = parse(rest)
    tokenizer = (
        None
        if config.data.resolved_tokenizer_type is None
        else configured_tokenizer(config.data, config.model.vocab_size)
    )
    for sample in trace_iteration(config, own.iteration):
        print(_heading(sample))
        for span in sample.spans:
            source = find_source(span.prefix, span.document)
            origin = f" from {source}" if source else ""
            print(f"  {_position(span)}{origin}: {_text(span, tokenizer, own.chars)}")


def _heading(sample: TracedSample) -> str:
    rank = "" if sample.dp_rank is None else f" (dp rank {sample.dp_rank}, microbatch {sample.microbatch})"
    return f"sample {sample.number}{rank}{f': {sample.source}' if sample.source else ''}"


def _position(span: SampleSpan) -> str:
    sequence = "" if span.sequence == span.document else f" sequence {span.sequence}"
    return (
        f"{span.prefix} document {span.document}{sequence} "
        f"tokens {span.offset} to {span.offset + len(span.tokens) - 1}"
    )


def _text(span: SampleSpan, tokenizer: Tokenizer | None, num_chars: int) -> str:
    """Return the start of a piece of text on one line, or its token ids if there is no tokenizer."""
    ids = span.tokens[: num_chars + 1].tolist()  # a token usually has at least one character
    text = repr(tokenizer.decode(ids))[1:-1] if tokenizer else " ".join(map(str, ids))
    return text if len(text) <= num_chars else f"{text[:num_chars]}…"
