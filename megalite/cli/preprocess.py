"""Tokenize text files to an indexed dataset, PREFIX_{json_key}_document.bin and .idx."""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from megalite.config.tool_parser import ToolParser, positive_int
from megalite.data.preprocessing.documents import MAX_DOCUMENT_BYTES, TEXT_DOCUMENTS
from megalite.data.preprocessing.preprocess import PreprocessingProgress, PreprocessJob, num_cores, preprocess
from megalite.data.tokenizers.tokenizer import TOKENIZER_TYPES, TokenizerFiles
from megalite.errors import UserError

_SECONDS_BETWEEN_LINES = 2.0


def _partition(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N - 1")
    return int(index), int(count)


def _key(text: str) -> str:
    """Check a JSON key, which becomes part of a file's name."""
    if not text or re.search(r"[/\0\ud800-\udfff]", text):  # surrogates stand for bytes that are not UTF-8
        raise argparse.ArgumentTypeError(f"{text!r} cannot be part of a file's name")
    return text


_Add = Callable[..., Any]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; flags have Megatron-LM's names where it has them."""
    parser = ToolParser(description=__doc__)
    _add_input(parser.add_argument)
    _add_tokenizer(parser.add_argument)
    _add_work(parser.add_argument)
    return parser


def _add_input(add: _Add) -> None:
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, globs or folders: .jsonl, .txt and .parquet, plain or .gz, .bz2, .xz, .zst; "
        "- is JSONL from standard input",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_{json_key}_document.bin and .idx, and a report as .json",
    )
    add(
        "--json-keys",
        nargs="+",
        type=_key,
        default=["text"],
        metavar="KEY",
        help="keys to extract, each to its own dataset; a.b is key b of the object a (text)",
    )
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence; writes PREFIX_{json_key}_sentence",
    )
    add("--lang", default="en", metavar="CODE", help="language of the sentences, by its ISO 639 code (en)")
    add(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default="file",
        help="unit of a .txt file that is one document (file)",
    )
    add(
        "--max-document-bytes",
        type=positive_int,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help=f"a longer line, paragraph or text file is a bad document ({MAX_DOCUMENT_BYTES})",
    )


def _add_tokenizer(add: _Add) -> None:
    add(
        "--tokenizer-type",
        metavar="TYPE",
        help=f"one of {', '.join(TOKENIZER_TYPES)}; by default detected from the files",
    )
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json or a SentencePiece model")
    add("--tokenizer-name-or-path", metavar="FOLDER", help="the folder of a tokenizer.json")
    add("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add("--vocab-size", type=positive_int, metavar="N", help="tokens of a NullTokenizer")


def _add_work(add: _Add) -> None:
    add(
        "--workers",
        type=positive_int,
        default=num_cores(),
        metavar="N",
        help="number of processes, which does not change the output (one per core)",
    )
    add("--on-error", choices=("fail", "skip"), default="fail", help="action for a bad document (fail)")
    add("--overwrite", action="store_true", help="replace existing output")
    add("--resume", action="store_true", help="continue a killed run of the same job")
    add(
        "--partition",
        type=_partition,
        default=(0, 1),
        metavar="I/N",
        help="process only part I of N of the input, I from 0, to PREFIX-0000I-of-0000N_...; "
        "all parts in order make up the whole",
    )
    add(
        "--dataset-impl",
        choices=("mmap",),
        default="mmap",
        help="the only format; accepted for scripts that pass it",
    )


def parse_job(arguments: list[str]) -> PreprocessJob:
    """Parse a command line to a job.

    Raises:
        UserError: the command line is wrong.
    """
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite contradict each other: continue a run, or replace it")
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
        sentence_language=args.lang if args.split_sentences else None,
        workers=args.workers,
        text_documents=args.text_documents,
        max_document_bytes=args.max_document_bytes,
        skip_bad_records=args.on_error == "skip",
        overwrite=args.overwrite,
        resume=args.resume,
        partition=args.partition,
    )


def _describe(progress: PreprocessingProgress) -> str:
    return (
        f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens, "
        f"{progress.num_skipped:,} skipped, {progress.seconds:.1f} s "
        f"({progress.bytes_per_second / 1e6:.1f} MB/s, {progress.tokens_per_second:,.0f} tokens/s)"
    )


class _ProgressBar:
    """Progress on stderr: one line that changes on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, progress: PreprocessingProgress) -> None:
        if time.monotonic() - self._last < (0.2 if self._terminal else _SECONDS_BETWEEN_LINES):
            return
        self._last = time.monotonic()
        share, left = progress.share, progress.seconds_left
        line = _describe(progress)
        if share is not None and left is not None:
            filled = int(20 * share)
            bar = f"[{'#' * filled}{'.' * (20 - filled)}] {share:4.0%}"
            line = f"{bar} {line}, {datetime.timedelta(seconds=round(left))} left"
        print(
            f"\r{line}\033[K" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class _Ended(KeyboardInterrupt):
    """A signal to end the program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> None:
    """End the program by an exception, so that its workers end with it; further signals are ignored."""
    for each in _END_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Ended(number)


def main(arguments: Sequence[str]) -> None:
    """Run the command, and exit with its status or that of the signal that ends it, at whatever moment."""
    try:
        for number in _END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, _end)
        raise SystemExit(_run(list(arguments)))
    except _Ended as ended:
        name = "interrupted" if ended.number == signal.SIGINT else signal.Signals(ended.number).name
        newline = "\n" if sys.stderr.isatty() else ""  # the progress bar has none
        sys.stderr.write(f"{newline}{name}: run the same command with --resume to continue\n")
        raise SystemExit(128 + ended.number) from None


def _run(arguments: list[str]) -> int:
    """Preprocess, and return the exit status."""
    bar = _ProgressBar()
    try:
        job = parse_job(arguments)
        summary = preprocess(job, bar)
    except UserError as error:
        bar.end()
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        return 1
    bar.end()
    outputs = ", ".join(f"{job.prefix(key)}.bin and .idx" for key in job.json_keys)
    if summary.was_complete:
        print(f"{outputs}: complete already")
        return 0
    print(f"wrote {outputs}: {_describe(summary.progress)}")
    for report in summary.reports:
        print("\n".join(report.lines()))
    return 0
