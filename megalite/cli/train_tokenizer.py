"""Train a tokenizer on a corpus: byte-level BPE as a tokenizer.json, or a SentencePiece model.

megalite train-tokenizer --input corpus/ --output tokenizer.json --vocab-size 50304
megalite train-tokenizer --input *.jsonl.zst --type sentencepiece-unigram --output spm.model

The same input and vocabulary size give the same tokenizer. It encodes any text without loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.tokenizers.train_tokenizer import (
    DEFAULT_VOCAB_SIZE,
    TRAINERS,
    read_texts,
    write_tokenizer,
)
from megalite.frontends.tool_parser import ToolParser, local_path


def main(arguments: Sequence[str]) -> None:
    """Train the tokenizer and write it."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    inputs = "files, globs or folders, as for megalite preprocess"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    output = "the tokenizer.json or .model to write"
    add("--output", type=local_path, required=True, metavar="FILE", help=output)
    types = f"type of the tokenizer: {', '.join(TRAINERS)} (%(default)s)"
    add("--type", choices=tuple(TRAINERS), default="bpe", metavar="TYPE", help=types)
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"number of tokens, with special tokens ({DEFAULT_VOCAB_SIZE}; bpe: fewer for a short text)",
    )
    add("--json-key", default="text", metavar="KEY", help="key of a document's text (text)")
    add("--max-documents", type=int, metavar="N", help="train on the first N documents (all)")
    add("--overwrite", action="store_true", help="replace an existing tokenizer")
    flags = parser.parse_args(arguments)

    texts = read_texts(flags.input, flags.json_key, flags.max_documents)
    train = TRAINERS[flags.type]
    num_tokens = write_tokenizer(flags.output, lambda: train(texts, flags.vocab_size), flags.overwrite)
    print(f"wrote {flags.output}: {num_tokens:,} tokens")
