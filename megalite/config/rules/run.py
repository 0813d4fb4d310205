"""Rules of what a run needs besides a model and a layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megalite.config.data import split_weights
from megalite.config.problem import Problem

if TYPE_CHECKING:
    from megalite.config.config import Config


def required(config: Config, world_size: int | None) -> Iterator[Problem]:
    """What has no default that could be right."""
    if config.training.train_iters is None:
        yield Problem(("train_iters",), "--train-iters is missing: give the number of optimizer steps")


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
