"""The model of the checkpoint that a run loads, for --use-checkpoint-args."""

from __future__ import annotations

import re
from pathlib import Path

from megalite.cli.findings import Findings, Setting
from megalite.cli.yaml import read_yaml
from megalite.config.checkpoint import CheckpointConfig
from megalite.folders import read_regular

_NAME = re.compile(r"iter_[0-9]{7,18}")
_MAX_BYTES = 1 << 24


def model_settings(checkpoint: CheckpointConfig, findings: Findings) -> dict[str, Setting]:
    """The model's fields as --load's checkpoint has them; none, and a notice, where there is no checkpoint.

    They are read from the resolved config that stands in each checkpoint. What else is in it, data and
    layout above all, is this run's own affair.
    """
    if checkpoint.load is None:
        return {}  # a rule of the config says so
    folder = _checkpoint_in(Path(checkpoint.load), checkpoint.load_iteration)
    if folder is None:
        findings.notices.append(
            f"--use-checkpoint-args: no checkpoint in --load {checkpoint.load} yet, the model is as given"
        )
        return {}
    settings = read_yaml(str(folder / "config.yaml"), findings)
    return {name: setting for name, setting in settings.items() if setting.field.group == "model"}


def _checkpoint_in(folder: Path, iteration: int | None) -> Path | None:
    """The one to load, as far as names tell: what is in it is checked when it is loaded."""
    if iteration is not None:
        names = [f"iter_{iteration:07d}"]
    else:
        names = [_latest(folder), *sorted((path.name for path in folder.glob("iter_*")), reverse=True)]
    found = (folder / name for name in names if _NAME.fullmatch(name))
    return next((path for path in found if _is_config(path / "config.yaml")), None)


def _is_config(file: Path) -> bool:
    return file.is_file() and file.stat().st_size <= _MAX_BYTES


def _latest(folder: Path) -> str:
    try:
        return read_regular(folder / "latest", 256).decode().strip()
    except (OSError, UnicodeError):
        return ""
