"""Tokenizes text files into an indexed dataset, PREFIX_{json_key}_document.bin and .idx."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import time
from typing import NoReturn

from megalite.data.documents import TEXT_DOCUMENTS
from megalite.data.preprocess import PreprocessJob, Progress, num_cores, preprocess
from megalite.data.tokenizer import TOKENIZER_TYPES, TokenizerFiles
from megalite.errors import UserError

_SECONDS_BETWEEN_LINES = 2.0


class _Parser(argparse.ArgumentParser):
    """Tells a wrong command line in one line, and exits as all of megalite's programs do."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists the flags")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def _key(text: str) -> str:
    """A JSON key becomes part of a file's name."""
    if not text or re.search(r"[/\0]", text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be part of a file's name")
    return text


def build_parser() -> argparse.ArgumentParser:
    """The flags; Megatron-LM's names where it has them."""
    parser = _Parser(prog="preprocess_data.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, globs or folders: .jsonl, .txt and .parquet, plain or .gz, .bz2, .xz, .zst",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_{json_key}_document.bin and .idx",
    )
    add(
        "--json-keys",
        nargs="+",
        type=_key,
        default=["text"],
        metavar="KEY",
        help="keys to extract, each to a dataset of its own (text)",
    )
    add(
        "--tokenizer-type",
        metavar="TYPE",
        help=f"one of {', '.join(TOKENIZER_TYPES)}; by default what the files are for",
    )
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json or a SentencePiece model")
    add("--tokenizer-name-or-path", metavar="FOLDER", help="the folder of a tokenizer.json")
    add("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add("--vocab-size", type=_positive, metavar="N", help="tokens of a NullTokenizer")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default="file",
        help="what is one document of a .txt file (file)",
    )
    add(
        "--workers",
        type=_positive,
        default=num_cores(),
        metavar="N",
        help="processes; the output is the same for any number (one a core)",
    )
    add("--on-error", choices=("fail", "skip"), default="fail", help="what to do about a bad document (fail)")
    add("--overwrite", action="store_true", help="replace existing output")
    add(
        "--dataset-impl",
        choices=("mmap",),
        default="mmap",
        help="the only format there is; accepted for scripts that give it",
    )
    return parser


def parse_job(arguments: list[str]) -> PreprocessJob:
    """The job that a command line describes.

    Raises:
        UserError: the command line is wrong.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], list(parser._option_string_actions), n=1)
        parser.error(f"{unknown[0]} is unknown" + (f", did you mean {near[0]}?" if near else ""))
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error("--json-keys names a key twice")
    files = TokenizerFiles(
        args.tokenizer_model, args.vocab_file, args.merge_file, args.tokenizer_name_or_path, args.vocab_size
    )
    return PreprocessJob(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer_type=args.tokenizer_type,
        tokenizer_files=files,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        text_documents=args.text_documents,
        skip_bad_records=args.on_error == "skip",
        overwrite=args.overwrite,
    )


def _describe(progress: Progress) -> str:
    seconds = max(progress.seconds, 1e-9)
    return (
        f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens, "
        f"{progress.num_skipped:,} skipped, {progress.seconds:.1f} s "
        f"({progress.num_bytes / 1e6 / seconds:.1f} MB/s, {progress.num_tokens / seconds:,.0f} tokens/s)"
    )


class _ProgressLines:
    """A line on stderr every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            print(_describe(progress), file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Runs the tool and returns its exit status."""
    try:
        job = parse_job(arguments)
        progress = preprocess(job, _ProgressLines())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outputs = ", ".join(f"{job.prefix(key)}.bin and .idx" for key in job.json_keys)
    print(f"wrote {outputs}: {_describe(progress)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
