"""Read the runs of a ladder: their sizes, their compute and their validation losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.frontends.command_line import NEEDED_TO_TRAIN, parse_run
from megalite.observe.report.run_folder import open_run
from megalite.observe.report.run_history import History
from megalite.plan.ladder.sizes import CONFIG_FILE, LadderRun, measured_run, vocab_size_of
from megalite.utils.errors import UserError

METRICS_FILE = "metrics.jsonl"
MIN_SIZES = 3


@dataclass(frozen=True)
class FinishedRun:
    """Run of a ladder, and its validation loss at its end."""

    run: LadderRun
    loss: float

    @property
    def name(self) -> str:
        return self.run.name


class TooFewRuns(UserError):
    """Raised when the finished runs do not suffice for a fit; the notes say which runs do not count."""

    def __init__(self, num_sizes: int, notes: list[str]) -> None:
        super().__init__(f"a fit needs runs of {MIN_SIZES} sizes or more, and there are {num_sizes}")
        self.notes = notes


def read_runs(folders: Sequence[Path], dataset: str | None) -> tuple[list[FinishedRun], list[str]]:
    """Read the runs in these folders, in the order of their compute.

    Args:
        folders: each is the folder of a run, or of several.
        dataset: name of the validation set, for runs with several; None for the only one.

    Returns:
        The runs, and a line for each run that is skipped and for each two that have the same compute.

    Raises:
        UserError: a folder holds no run, or the vocabularies differ.
        TooFewRuns: the runs do not suffice for a fit.
    """
    found, notes = list[FinishedRun](), list[str]()
    for folder in dict.fromkeys(each.resolve() for path in folders for each in _run_folders(path)):
        try:
            found.append(_finished_run(folder, dataset))
        except UserError as error:
            notes.append(f"{folder.name} is skipped: {error}")
    found.sort(key=lambda each: each.run.flops)
    by_compute: dict[float, FinishedRun] = {}
    for each in found:
        other = by_compute.setdefault(each.run.flops, each)
        if other is not each:
            notes.append(f"{other.name} and {each.name} have the same compute: they count as one size")
    if len(by_compute) < MIN_SIZES:
        raise TooFewRuns(len(by_compute), notes)
    sizes = {each.run.vocab_size: each.name for each in found}
    if len(sizes) > 1:
        (size, first), (other_size, second), *_ = sizes.items()
        raise UserError(
            f"{first} has a vocabulary of {size} tokens and {second} of {other_size}: their losses are not "
            "comparable, fit them apart"
        )
    return found, notes


def read_planned_run(file: Path) -> LadderRun:
    """Return the run that a config file describes.

    Raises:
        UserError: the file has no length of the run, or no vocabulary size.
    """
    config, _, _ = parse_run(["--config", str(file)], ("mock_data", "tokenizer_type"))
    if config.training.train_iters is None and config.training.train_samples is None:
        raise UserError(f"{file} has no length of the run: add train_iters to it")
    dp = config.parallel.data_parallel_size or 1
    name = file.parent.name if file.name == CONFIG_FILE else file.stem
    tokens = config.num_samples(dp) * config.model.seq_length
    return measured_run(name, config, vocab_size_of(config), tokens)


def _run_folders(path: Path) -> Iterator[Path]:
    """Yield the folder itself if it has a metrics file, or else its folders that have one, or a config."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: pass the folder of a ladder, or of a run")
    if (path / METRICS_FILE).is_file():
        yield path
        return
    files = (METRICS_FILE, CONFIG_FILE)
    runs = [each for each in sorted(path.iterdir()) if any((each / file).is_file() for file in files)]
    if not any((each / METRICS_FILE).is_file() for each in runs):
        raise UserError(f"{path} holds no {METRICS_FILE} of a run: train one with --save in it")
    yield from runs


def _finished_run(folder: Path, dataset: str | None) -> FinishedRun:
    """Read one run.

    Raises:
        UserError: it has not finished, has no loss, or has no checkpoint with its config.
    """
    if not (folder / METRICS_FILE).is_file():
        raise UserError("it has not started")
    run = open_run(folder)
    last = run.history.iterations[-1]
    length = last.values.get("train_iters", math.inf)
    if last.iteration < length:
        raise UserError(f"it has not finished: iteration {last.iteration:,} of {length:,.0f}")
    tokens = last.values.get("consumed_tokens", 0.0)
    if run.manifest is None:
        raise UserError("it has no checkpoint, which has its config")
    config, _, _ = parse_run(["--config", run.config_source], NEEDED_TO_TRAIN)
    vocab_size = run.manifest.description["model"].get("vocab_size")  # which the run had
    return FinishedRun(
        measured_run(folder.name, config, vocab_size, int(tokens)),
        _last_loss(run.history, last.iteration, dataset),
    )


def _last_loss(history: History, iteration: int, dataset: str | None) -> float:
    wanted = "valid" if dataset is None else f"valid {dataset}"
    rows = {row.name: row for row in history.evaluations if row.iteration == iteration}
    if wanted not in rows:
        names = [name.removeprefix("valid ") for name in rows if name.startswith("valid ")]
        hint = f": pass --dataset with one of {', '.join(names)}" if names else ""
        raise UserError(f"it was not evaluated at its end{f' on {dataset}' if dataset else ''}{hint}")
    loss = rows[wanted].values["lm_loss"]
    if not 0 < loss < math.inf:
        raise UserError(f"its validation loss is {loss}")
    return loss
