"""Tokenize text files into an indexed dataset, PREFIX_{json_key}_document.bin and .idx."""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from megalite.config.option import flag_of, flag_with_value
from megalite.data.preprocessing.documents import MAX_DOCUMENT_BYTES, TEXT_DOCUMENTS, find_inputs, input_kind
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import num_cores, preprocess, problems_of
from megalite.data.preprocessing.preprocessing_report import PreprocessingProgress, skipped_text
from megalite.data.tokenizers.tokenizer import TOKENIZER_TYPES, TokenizerFiles
from megalite.frontends.tool_parser import ToolParser, positive_int
from megalite.utils.errors import ConfigError
from megalite.utils.log import ProgressLine, log

_SECONDS_BETWEEN_LINES = 2.0
DEFAULT_CHAT_KEY = "messages"
_PADDING = "padding of the vocabulary does not change the tokens"
_TOKENIZER = "a tokenizer has one implementation here, and adds no special tokens"
_NOT_NEEDED: dict[str, tuple[str | int | None, str]] = {
    "partitions": (None, "the workers share all files, and write one dataset in the order of the input"),
    "keep_sequential_samples": (0, "documents always keep the order of the input"),
    "max_documents": (None, "it only limits the search of --find-optimal-num-workers"),
    "workers_to_check": ("+", "it only limits the search of --find-optimal-num-workers"),
    "vocab_extra_ids": (None, "no text contains extra tokens, and Megatron-LM's script ignores the flag too"),
    "seq_length": (None, "documents are not split: training makes samples of --seq-length tokens"),
    "make_vocab_size_divisible_by": (None, _PADDING),
    "pad_vocab_size_to": (None, _PADDING),
    "padded_vocab_size": (None, _PADDING),
    "no_pad_vocab_size": (0, _PADDING),
    "tokenizer_hf_no_use_fast": (0, _TOKENIZER),
    "tokenizer_hf_no_include_special_tokens": (0, _TOKENIZER),
    "use_gigatoken": (0, _TOKENIZER),
    "legacy_tokenizer": (0, _TOKENIZER),
}
"""Flags of Megatron's scripts that change nothing, by their name in the namespace: argparse's `nargs` (0 for
a switch), and the reason."""
_TOKENIZER_JSON = "remove it; a tokenizer.json (--tokenizer-model) holds a tokenizer with all its options"
_REFUSED: dict[str, tuple[str | int | None, str]] = {
    "find_optimal_num_workers": (
        0,
        "remove it: by default there is one worker per core, and the command prints its speed at the end",
    ),
    "trust_remote_code": (0, "remove it: megalite runs no code from a tokenizer's folder"),
    "tokenizer_metadata": (None, _TOKENIZER_JSON),
    "tokenizer_special_tokens": ("+", _TOKENIZER_JSON),
    "tokenizer_sentencepiece_legacy": (0, _TOKENIZER_JSON),
    "no_tokenizer_sentencepiece_ignore_extra_whitespaces": (0, _TOKENIZER_JSON),
    "tiktoken_pattern": (None, _TOKENIZER_JSON),
    "tiktoken_num_special_tokens": (None, _TOKENIZER_JSON),
    "tiktoken_special_tokens": ("+", _TOKENIZER_JSON),
    "null_tokenizer_eod_id": (None, "remove it: the end-of-document token is --vocab-size - 1"),
    "null_tokenizer_pad_id": (None, "remove it: no sample is padded"),
    "chat_template": (
        None,
        "remove it: --chat reads the tokenizer's own, from its tokenizer_config.json or chat_template.jinja",
    ),
}
"""Flags of Megatron's scripts that are not supported: argparse's `nargs`, and what to do instead."""
_LANGUAGES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
"""Language codes for the names that Megatron's script takes, which are NLTK's."""


def partition(text: str) -> tuple[int, int]:
    """Parse a part I of N, written I/N."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N - 1")
    return int(index), int(count)


def _language(text: str) -> str:
    """Check a language code. The library would treat any other word, such as "german", as English."""
    if text in _LANGUAGES:
        return _LANGUAGES[text]
    if not re.fullmatch(r"[a-z]{2,3}([-_][A-Za-z]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an ISO 639 code, such as en or de")
    return text


def _key(text: str) -> str:
    """Check a JSON key, which becomes part of a file's name."""
    if not text or re.search(r"[/\0\ud800-\udfff]", text):  # surrogates represent bytes that are not UTF-8
        raise argparse.ArgumentTypeError(f"{text!r} cannot be part of a file's name")
    return text


_Add = Callable[..., Any]


def build_parser() -> ToolParser:
    """Build the parser. Flags that Megatron-LM has keep its names."""
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
        help="files, globs or folders: .jsonl and .txt, plain or .gz, .bz2, .xz, .zst, .parquet and .arrow; "
        "- reads JSONL from standard input",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_{json_key}_document.bin and .idx, and a report as .json",
    )
    add(
        "--json-keys",
        "--json-key",
        nargs="+",
        type=_key,
        metavar="KEY",
        help="keys to extract, each to its own dataset; a.b is key b of the object a (text, with --chat "
        "messages)",
    )
    add(
        "--chat",
        action="store_true",
        help="render conversations with the tokenizer's chat template, and write a mask of the answers as "
        ".loss_mask",
    )
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence; write PREFIX_{json_key}_sentence",
    )
    add(
        "--lang",
        type=_language,
        metavar="CODE",
        help="with --split-sentences: the language, as ISO 639 code or English name (en)",
    )
    add(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: end each sentence with the newlines and spaces that follow it",
    )
    add(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default="file",
        help="unit of a .txt file that is one document (file); blank lines separate paragraphs",
    )
    add(
        "--max-document-bytes",
        type=positive_int,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help=f"treat a longer line, paragraph or text file as a bad document ({MAX_DOCUMENT_BYTES})",
    )


def _add_tokenizer(add: _Add) -> None:
    add(
        "--tokenizer-type",
        metavar="TYPE",
        help=f"one of {', '.join(TOKENIZER_TYPES)}; by default detected from the files",
    )
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json or a SentencePiece model")
    add("--tokenizer-name-or-path", metavar="FOLDER", help="the folder of a tokenizer.json")
    add("--vocab-file", "--vocab", metavar="FILE", help="GPT-2's vocab.json, or BERT's vocab.txt")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add("--vocab-size", type=positive_int, metavar="N", help="tokens of a NullTokenizer")


def _add_work(add: _Add) -> None:
    add(
        "--workers",
        type=positive_int,
        default=num_cores(),
        metavar="N",
        help="number of processes; it does not change the output (one per core)",
    )
    add(
        "--log-interval",
        type=positive_int,
        metavar="N",
        help="print progress after every N documents, or after more where a part of the input is done later "
        "(every 2 seconds)",
    )
    add("--on-error", choices=("fail", "skip"), default="fail", help="action for a bad document (fail)")
    add("--overwrite", action="store_true", help="replace existing output")
    add("--resume", action="store_true", help="continue a killed run of the same job")
    add(
        "--partition",
        type=partition,
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
    for name, (num_values, _) in (_NOT_NEEDED | _REFUSED).items():
        values = {"action": "store_true"} if num_values == 0 else {"nargs": num_values}
        add(flag_of(name), help=argparse.SUPPRESS, **values)


def parse_job(arguments: list[str]) -> tuple[PreprocessJob, int | None]:
    """Parse a command line to a job, and the number of documents between progress lines; log unused flags.

    Raises:
        ConfigError: with all mistakes in the command line and the job.
    """
    args, problems = build_parser().find_problems(arguments)
    if args.resume and args.overwrite:
        problems.append("--resume and --overwrite contradict each other: remove one")
    json_keys = args.json_keys or [DEFAULT_CHAT_KEY if args.chat else "text"]
    if len(set(json_keys)) < len(json_keys):
        problems.append("--json-keys names a key twice")
    problems += _chat_problems(args) if args.chat else []
    # The flags that were passed or have a default, by their name in the namespace.
    passed = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if value is not None and value is not False
    }
    problems += [
        f"{flag_with_value(name, passed[name])} is not supported: {fix}"
        for name, (_, fix) in _REFUSED.items()
        if name in passed
    ]
    files = TokenizerFiles(
        args.tokenizer_model, args.vocab_file, args.merge_file, args.tokenizer_name_or_path, args.vocab_size
    )
    job = PreprocessJob(
        inputs=tuple(args.input or ()),
        output_prefix=args.output_prefix or "",
        tokenizer_type=args.tokenizer_type,
        tokenizer_files=files,
        json_keys=tuple(json_keys),
        append_eod=args.append_eod,
        chat=args.chat,
        sentence_language=(args.lang or "en") if args.split_sentences else None,
        keep_newlines=args.keep_newlines and args.split_sentences,
        workers=args.workers,
        text_documents=args.text_documents,
        max_document_bytes=args.max_document_bytes,
        skip_bad_records=args.on_error == "skip",
        overwrite=args.overwrite,
        resume=args.resume,
        partition=args.partition,
    )
    if problems:
        raise ConfigError([*problems, *problems_of(job)])
    notices = [
        f"{flag_with_value(name, passed[name])} is not needed: {why}"
        for name, (_, why) in _NOT_NEEDED.items()
        if name in passed
    ]
    if not args.split_sentences:
        notices += [
            f"{flag_with_value(name, passed[name])} has no effect without --split-sentences"
            for name in ("lang", "keep_newlines")
            if name in passed
        ]
    sys.stderr.writelines(f"note: {notice}\n" for notice in notices)
    return job, args.log_interval


def _chat_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if len(args.json_keys or ()) > 1:
        problems.append("--chat reads one list of messages: pass one key in --json-keys")
    if args.append_eod:
        problems.append("--chat and --append-eod: remove --append-eod, the chat template ends each turn")
    if args.split_sentences:
        problems.append("--chat and --split-sentences contradict each other: remove one")
    return problems


def _describe(progress: PreprocessingProgress) -> str:
    return (
        f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens, "
        f"{skipped_text(progress)}, {progress.seconds:.1f} s "
        f"({progress.bytes_per_second / 1e6:.1f} MB/s, {progress.tokens_per_second:,.0f} tokens/s)"
    )


def _describe_part(progress: PreprocessingProgress) -> str:
    """Return what is done, after a bar if it is known how much is left."""
    share, left = progress.share, progress.seconds_left
    if share is None or left is None:
        return _describe(progress)
    bar = "#" * int(20 * share)
    return f"[{bar:.<20}] {share:4.0%} {_describe(progress)}, {datetime.timedelta(seconds=round(left))} left"


def _show_every(num_documents: int) -> Callable[[PreprocessingProgress], None]:
    """Return a function that shows progress as a line for each number of documents, also on a terminal."""
    num_shown = 0

    def show(progress: PreprocessingProgress) -> None:
        nonlocal num_shown
        before, num_shown = num_shown, progress.num_documents // num_documents
        if num_shown > before:
            print(_describe_part(progress), file=sys.stderr, flush=True)

    return show


class _Ended(KeyboardInterrupt):
    """Raised on a signal that ends the program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> None:
    """End the program by an exception, so that its workers end too; ignore further signals."""
    for each in _END_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Ended(number)


def main(arguments: Sequence[str]) -> None:
    """Run the command. A signal that ends it at any time sets the exit status."""
    try:
        for number in _END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _end)
        _run(list(arguments))
    except _Ended as ended:
        name = "interrupted" if ended.number == signal.SIGINT else signal.Signals(ended.number).name
        sys.stderr.write(f"{name}: run the same command with --resume to continue\n")
        raise SystemExit(128 + ended.number) from None


def _run(arguments: list[str]) -> None:
    job, log_interval = parse_job(arguments)
    with ProgressLine(seconds_between_lines=_SECONDS_BETWEEN_LINES) as line:
        summary = preprocess(
            job,
            _show_every(log_interval) if log_interval else lambda progress: line(_describe_part(progress)),
        )
    outputs = ", ".join(f"{job.prefix(key)}.bin and .idx" for key in job.json_keys)
    if summary.was_complete:
        print(f"{outputs}: complete already")
        return
    print(f"wrote {outputs}: {_describe(summary.progress)}")
    if summary.progress.num_documents == 1:
        has_text = any(input_kind(file, job.text_documents) == "file" for file in find_inputs(job.inputs))
        log.warning(
            "the input is one document, and a training run's --split cannot divide a document: %s",
            "to get validation data from a .txt file, pass --text-documents paragraph (or line)"
            if has_text
            else "preprocess more documents, or validation data of its own for --valid-data-path",
        )
    for report in summary.reports:
        print("\n".join(report.lines()))
        if count := report.num_special_in_texts:
            log.warning(
                "%s: %s with the text of a special token, which becomes the token (first %s); training ends "
                "a document at each of %d end-of-document tokens: remove them from the texts unless this is "
                "intended",
                *(report.prefix, "one document" if count == 1 else f"{count:,} documents"),
                *(report.first_special_in_texts, report.num_ends_in_texts),
            )
