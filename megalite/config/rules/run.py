"""Rules of what a run needs besides a model and a layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megalite.config.data import split_weights
from megalite.config.problem import Problem
from megalite.config.training import iteration_range

if TYPE_CHECKING:
    from megalite.config.config import Config


def required(config: Config, world_size: int | None) -> Iterator[Problem]:
    """What has no default that could be right."""
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            ("train_iters", "train_samples"),
            "--train-iters is missing: give the number of optimizer steps, or --train-samples",
        )
    elif training.train_iters is not None and training.train_samples is not None:
        yield Problem(
            ("train_iters", "train_samples"),
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples} both give "
            "the length of the run: leave one out",
        )


def skipped_iterations(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Each word of --iterations-to-skip is a range of iterations."""
    for word in config.training.iterations_to_skip:
        if iteration_range(word) is None:
            yield Problem(
                ("iterations_to_skip",),
                f"--iterations-to-skip {word} is no range: give FIRST:LAST counted from 1, as in 120:125, "
                "or one iteration",
            )


def hang_timeout(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The watchdog's report comes before the errors of collectives, which tell less."""
    minutes = config.parallel.distributed_timeout_minutes
    latest = minutes * 60 * 3 / 4  # the others must be heard, or found silent
    if config.hang_timeout > latest:
        yield Problem(
            ("hang_timeout", "distributed_timeout_minutes"),
            f"--hang-timeout {config.hang_timeout:g} leaves no time for its report before collectives fail "
            f"by --distributed-timeout-minutes {minutes}: give at most {latest:g}, or more minutes there",
        )


def split(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The split is one to three weights."""
    text = config.data.split
    if not split_weights(text):
        yield Problem(
            ("split",),
            f"--split {text} is no split: give the weights of train, validation and test, as in 949,50,1",
        )


def tokenizer(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The vocabulary's size comes from a tokenizer that has its files, or is given."""
    data = config.data
    kind = data.resolved_tokenizer_type
    if kind is None or kind == "NullTokenizer":
        if config.model.vocab_size is None:
            yield Problem(
                ("tokenizer_type", "vocab_size", "tokenizer_model", "vocab_file", "tokenizer_name_or_path"),
                "the vocabulary is not known: give --vocab-size, or the --tokenizer-type that the corpus was "
                "made with and its files (byte needs none)",
            )
        return
    for flags in data.files_missing_for(kind):
        yield Problem(
            ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path"),
            f"tokenizer {kind} needs {flags}: give it, or another --tokenizer-type",
        )


def profiler(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The profiler's trace has a folder to go to."""
    if config.logging.profile_execution and config.logging.tensorboard_dir is None:
        yield Problem(
            ("profile_execution", "tensorboard_dir"),
            "--profile-execution needs --tensorboard-dir: the trace is written there",
        )
