"""Rules of how corpora are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.data import CORPUS_FIELDS
from megalite.config.flags import flag_of
from megalite.config.problem import Problem


def given(config: Config, world_size: int | None) -> Iterator[Problem]:
    """There is something to train on, said in one way."""
    data = config.data
    if data.mock_data:
        return
    ways = data.ways_given()
    if not ways:
        yield Problem(
            (*CORPUS_FIELDS, "mock_data"),
            "--data-path is missing: give the prefix of a .bin/.idx pair of tools/preprocess_data.py, "
            "or --mock-data",
        )
    for one, other in itertools.pairwise(ways):
        yield Problem(
            (*one, *other),
            f"{flag_of(one[0])} and {flag_of(other[0])} both give the corpora: leave one out",
        )


def train_part(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Splits that are given apart have one to train on."""
    data = config.data
    for way in [] if data.mock_data else data.ways_given():
        apart = [name for name in way if name.startswith(("valid_", "test_"))]
        if apart and not any(name.startswith("train_") for name in way):
            _, _, kind = apart[0].removesuffix("_path").partition("_")
            train = flag_of("train_data_path" if kind == "data" else "train_weighted_split_paths")
            yield Problem(
                (*CORPUS_FIELDS, "mock_data"),
                f"{flag_of(apart[0])} is given without {train}: give what to train on",
            )


def fill_in_middle(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Cutting documents between characters takes the tokenizer that made them, and it must add nothing."""
    data = config.data
    kind = data.resolved_tokenizer_type
    if (
        data.fim_rate > 0
        and not data.mock_data
        and kind in (None, "byte", "NullTokenizer", "Llama2Tokenizer")
    ):
        given = f"--tokenizer-type {kind}" if kind else "no tokenizer"
        yield Problem(
            ("fim_rate", "tokenizer_type", "tokenizer_model", "vocab_file", "tokenizer_name_or_path"),
            f"--fim-rate {data.fim_rate} with {given}: give the one that the corpus was made with, "
            "whose vocabulary has the --fim-prefix-token, --fim-middle-token and --fim-suffix-token",
        )


def document_ends(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The end-of-document token is the tokenizer's; random tokens have one without any."""
    data = config.data
    asked = data.document_options
    if asked and data.resolved_tokenizer_type is None and not data.mock_data:
        yield Problem(
            (*asked, "tokenizer_type", "tokenizer_model", "vocab_file", "tokenizer_name_or_path"),
            f"{' '.join(map(flag_of, asked))} with no tokenizer: give the --tokenizer-type that the corpus "
            "was made with, whose end-of-document token parts the documents",
        )


def weighted_split_files(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A split's weighted groups are on the command line or in a file."""
    for split in ("train", "valid", "test"):
        name = f"{split}_weighted_split_paths"
        if getattr(config.data, name) and getattr(config.data, f"{name}_path"):
            yield Problem(
                (name, f"{name}_path"),
                f"{flag_of(name)} and {flag_of(name)}-path both give the same: leave one out",
            )
