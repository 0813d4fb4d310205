"""Rules for corpora, the tokenizer, checkpoints and the dry run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.data import CORPUS_FIELDS, TOKENIZER_FIELDS
from megalite.config.option import flag_of
from megalite.utils.commands import command_name
from megalite.utils.errors import Problem


def corpus(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that there is a corpus, and that it is set in only one way."""
    data = config.data
    if data.mock_data:
        return
    ways = data.corpus_options()
    if not ways:
        yield Problem(
            (*CORPUS_FIELDS, "mock_data"),
            f"--data-path is missing: pass the prefix of a .bin/.idx pair of {command_name('preprocess')}, "
            "or --mock-data",
        )
    for one, other in itertools.pairwise(ways):
        yield Problem(
            (*one, *other),
            f"{flag_of(one[0])} and {flag_of(other[0])} both set the corpora: remove one",
        )


def training_split(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that separate validation or test data are passed together with training data."""
    data = config.data
    for way in [] if data.mock_data else data.corpus_options():
        others = [name for name in way if name.startswith(("valid_", "test_"))]
        if others and not any(name.startswith("train_") for name in way):
            _, _, kind = others[0].removesuffix("_path").partition("_")
            train = flag_of("train_data_path" if kind == "data" else "train_weighted_split_paths")
            yield Problem(
                (*CORPUS_FIELDS, "mock_data"),
                f"{flag_of(others[0])} is set, but {train} is not: pass {train}",
            )


def fill_in_middle(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the tokenizer can split documents: it must be the corpus's own and must not add tokens."""
    data = config.data
    kind = data.resolved_tokenizer_type
    unsuitable = (None, "byte", "NullTokenizer", "Llama2Tokenizer")
    if data.fim_rate > 0 and not data.mock_data and kind in unsuitable:
        current = f"--tokenizer-type {kind}" if kind else "no tokenizer"
        yield Problem(
            ("fim_rate", *TOKENIZER_FIELDS),
            f"--fim-rate {data.fim_rate} with {current}: pass the tokenizer of the corpus, whose vocabulary "
            "must have the --fim-prefix-token, --fim-middle-token and --fim-suffix-token",
        )


def document_ends(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that options for document boundaries have a tokenizer, whose end-of-document token marks them."""
    data = config.data
    options = data.document_options
    is_packed = data.sft or data.packs_documents
    if options and data.resolved_tokenizer_type is None and not data.mock_data and not is_packed:
        yield Problem(
            (*options, *TOKENIZER_FIELDS),
            f"{' '.join(map(flag_of, options))} without a tokenizer: pass the corpus's --tokenizer-type, "
            "whose end-of-document token separates the documents",
        )


def tokenizer(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the vocabulary size is set, or that a tokenizer with all its files determines it."""
    data = config.data
    kind = data.resolved_tokenizer_type
    if kind is None or kind == "NullTokenizer":
        if config.model.vocab_size is None:
            yield Problem(
                ("vocab_size", *TOKENIZER_FIELDS),
                "the vocabulary size is unknown: pass --vocab-size, or the --tokenizer-type of the corpus "
                "and its files (byte needs none)",
            )
        return
    for flags in data.files_missing_for(kind):
        yield Problem(
            TOKENIZER_FIELDS,
            f"tokenizer {kind} needs {flags}: pass it, or another --tokenizer-type",
        )


def finetune(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a new run does not save over the run that it loads."""
    checkpoint = config.checkpoint
    if checkpoint.finetune and checkpoint.loads_own:
        yield Problem(
            ("finetune", "save", "load"),
            f"--finetune starts a new run at iteration 0, but --save {checkpoint.save} is also --load: "
            "pass another --save",
        )


def no_load_optim(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a restarted run does not drop the optimizer state that it saved."""
    checkpoint = config.checkpoint
    drops_own = not checkpoint.load_optim and checkpoint.save_optim and checkpoint.loads_own
    if drops_own and not checkpoint.finetune:
        yield Problem(
            ("load_optim", "save", "load"),
            "--no-load-optim would drop the optimizer state at every restart, since --save "
            f"{checkpoint.save} is also --load: pass another --save, or --no-save-optim too",
        )


def dry_run_rank(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the reported rank of a dry run exists."""
    dry_run = config.dry_run
    if dry_run.dry_run and world_size is not None and dry_run.rank >= world_size:
        yield Problem(
            ("rank", "world_size"),
            f"--rank {dry_run.rank} is not one of {world_size} ranks: pass 0 to {world_size - 1}, or a "
            "larger --world-size",
        )


def dry_run_json(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the folder for the dry run's report exists, before any work is done."""
    path = config.dry_run.dry_run_json
    if config.dry_run.dry_run and path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        yield Problem(
            ("dry_run_json",),
            f"--dry-run-json {path} cannot be written: there is no folder {os.path.dirname(path)}",
        )
