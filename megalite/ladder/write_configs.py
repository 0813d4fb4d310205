"""Write the configs of a ladder's runs, one file for each size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.config import Config, to_yaml
from megalite.errors import UserError
from megalite.files import replace_file
from megalite.ladder.sizes import (
    LadderRun,
    ScalingRules,
    check_reference,
    measured_run,
    scaled_run,
    vocab_size_of,
)
from megalite.plan.quantities import plain

CONFIG_FILE = "config.yaml"
HEADS = ("run", "layers", "hidden", "heads", "parameters", "batch", "iterations", "tokens", "lr", "FLOPs")


def ladder_runs(
    config: Config, rules: ScalingRules, sizes: Sequence[int], ratios: Sequence[float]
) -> list[LadderRun]:
    """Return a run for each size and number of tokens per parameter.

    Args:
        config: the reference.

    Raises:
        UserError: the reference or a size is invalid, or two sizes are the same.
    """
    check_reference(config)
    flag = f"--{rules.dimension}s"
    if twice := [size for size in dict.fromkeys(sizes) if sizes.count(size) > 1]:
        raise UserError(f"{flag} has {twice[0]} twice: remove one")
    if ties := [ratio for ratio in dict.fromkeys(ratios) if ratios.count(ratio) > 1]:
        raise UserError(f"--tokens-per-parameter has {plain(ties[0])} twice: remove one")
    reference = measured_run("", config, vocab_size_of(config), tokens=0)
    return [
        scaled_run(reference, rules, size, ratio, _name(rules, size, ratio, len(ratios) > 1))
        for size in sizes
        for ratio in ratios
    ]


def write_configs(runs: Sequence[LadderRun], folder: Path, set_fields: Collection[str]) -> Iterator[Path]:
    """Write the config of each run into a folder of its own, where the run will save; yield the files.

    Args:
        set_fields: fields that a flag or a file of the reference sets.

    Raises:
        UserError: a folder has the config of another run, or cannot be written.
    """
    texts = {folder / run.name / CONFIG_FILE: _text(run, folder / run.name, set_fields) for run in runs}
    for file, text in texts.items():
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise UserError(f"{file} is of another ladder: remove {file.parent}, or pass another --output")
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}): pass another --output") from None
        yield file


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose first column is aligned to the left, and all others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (heads, *rows)
    ]


def ladder_lines(runs: Sequence[LadderRun]) -> list[str]:
    """Return the table of the runs, in `HEADS`."""
    rows = [
        (
            run.name,
            f"{run.config.model.num_layers}",
            f"{run.config.model.hidden_size}",
            f"{run.config.model.num_attention_heads}",
            f"{run.parameters:,}",
            f"{run.config.training.global_batch_size}",
            f"{run.config.training.train_iters:,}",
            f"{run.tokens:,}",
            f"{run.config.optimizer.lr:.2e}",
            f"{run.flops:.2e}",
        )
        for run in runs
    ]
    return table_lines(HEADS, rows)


def _name(rules: ScalingRules, size: int, ratio: float, has_ratio: bool) -> str:
    return f"{rules.dimension}-{size}" + (f"-tokens-{ratio:g}" if has_ratio else "")


def _text(run: LadderRun, folder: Path, set_fields: Collection[str]) -> str:
    """Return the run's config as YAML, without fields that are not set and have their defaults."""
    checkpoint = replace(run.config.checkpoint, save=str(folder), load=str(folder))
    config, defaults = replace(run.config, checkpoint=checkpoint), Config().values()
    unset = {
        name for name, value in config.values().items() if value == defaults[name] and name not in set_fields
    }
    return (
        f"# {run.name}: {run.parameters:,} parameters of layers and output layer, {run.all_parameters:,} in "
        f"all, {run.tokens:,} tokens, {run.flops:.3e} model FLOPs\n{to_yaml(config, unset)}"
    )
