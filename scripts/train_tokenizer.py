"""Trains a byte-level BPE tokenizer on JSONL files and writes the `tokenizer.json` that preprocessing reads.

The same input and vocabulary size give the same bytes. Id 0 is `<|endoftext|>`, then come the 256 bytes, so
that any text can be encoded and decoded without loss; the rest are merges, most frequent first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""`<|endoftext|>` and one token a byte: a smaller vocabulary could not encode every text."""


def read_texts(paths: Sequence[Path], json_key: str) -> Iterator[str]:
    """Yields the text of each line of JSONL files, gzipped where a name ends in .gz.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged or not UTF-8, or a line has no string under `json_key`.
    """
    for path in paths:
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8")
                if path.suffix == ".gz"
                else path.open(encoding="utf-8") as file
            ):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _text_of(line, json_key, where=f"{path}:{number}")
        except (EOFError, zlib.error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: damaged, or not UTF-8 ({error}); make or fetch the file again"
            ) from error


def _text_of(line: str, json_key: str, where: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a line of JSON ({error}); --input takes JSONL") from error
    text = document.get(json_key) if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: no string under the key {json_key!r}; name the text's key with --json-key"
        )
    return text


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE with GPT-2's splitting into words, a word carrying its leading space.

    Raises:
        ValueError: the texts are too few for `vocab_size` tokens, or `vocab_size` is below MIN_VOCAB_SIZE.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"--vocab-size {vocab_size} is below {MIN_VOCAB_SIZE} (256 bytes and {END_OF_TEXT})")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the input yields only {tokenizer.get_vocab_size()} of --vocab-size {vocab_size} tokens; "
            "ask for fewer or give more text"
        )
    return tokenizer


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="JSONL files, plain or .gz")
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument(
        "--vocab-size", type=int, default=2048, help="tokens in all, special ones too (%(default)s)"
    )
    parser.add_argument("--json-key", default="text", help="key of a document's text (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and writes; a mistake in the input is one line on stderr and exit status 1."""
    args = parse_args(argv)
    try:
        tokenizer = train(read_texts(args.input, args.json_key), args.vocab_size)
        args.output.write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
