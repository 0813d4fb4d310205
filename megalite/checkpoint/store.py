"""Checkpoints on disk: a folder an iteration, one safetensors file for each pipeline stage and tensor slice.

    SAVE/latest                              name of the newest whole checkpoint
    SAVE/iter_0000010/run.json               progress, layout, model
    SAVE/iter_0000010/pp_00_tp_00.safetensors

A checkpoint is written under another name and renamed once it is whole; `latest` moves last: a run that
dies while it saves leaves what it saved before. Data-parallel replicas hold the same tensors: the first one
writes them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from megalite.checkpoint.progress import Progress
from megalite.config import Config
from megalite.errors import UserError
from megalite.topology import Topology

FORMAT = 1


def save_checkpoint(
    folder: Path, progress: Progress, tensors: Mapping[str, Tensor], config: Config, topology: Topology
) -> Path:
    """Writes this rank's tensors and, once every rank's are on disk, makes the checkpoint the latest.

    Args:
        folder: of all the run's checkpoints, on a file system that every rank sees.
        tensors: local tensors by name.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: some rank could not write; raised on every rank, and nothing half-written is left.
    """
    final = folder / f"iter_{progress.iteration:07d}"
    aside = folder / f".{final.name}.partial"
    description = _description(progress, config, topology)
    try:
        with topology.agreed(), _write_errors(final):  # each agreement also waits for every rank
            if topology.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        with topology.agreed(), _write_errors(final):
            if topology.dp.is_first:
                safetensors.torch.save_file(dict(tensors), aside / _file_name(topology))
        with topology.agreed(), _write_errors(final):
            if topology.rank == 0:
                _write_text(aside / "run.json", json.dumps(description, indent=1))
                _move_folder(aside, final)
                _write_text(folder / "latest", final.name)
    except UserError:
        if topology.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], config: Config, topology: Topology
) -> Progress | None:
    """Copies the latest checkpoint's tensors into this rank's, in place.

    Returns:
        Where the run had come to; None where the folder holds no checkpoint.

    Raises:
        UserError: the checkpoint is of another model, run or layout, or cannot be read. Other ranks may have
            met nothing: call it inside `topology.agreed()`.
    """
    checkpoint = folder
    try:
        latest = folder / "latest"
        if not latest.exists():
            return None
        checkpoint = folder / latest.read_text().strip()
        description = _read_description(checkpoint / "run.json")
        _check(description, checkpoint, config, topology)
        _copy_tensors(checkpoint / _file_name(topology), tensors, topology.device)
        return Progress(**description["progress"])
    except UserError:
        raise
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({error}): load another, or leave out --load"
        ) from error


def _file_name(topology: Topology) -> str:
    return f"pp_{topology.pp.rank:02d}_tp_{topology.tp.rank:02d}.safetensors"


def _description(progress: Progress, config: Config, topology: Topology) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "progress": dataclasses.asdict(progress),
        **_identity(config, topology),
    }


def _identity(config: Config, topology: Topology) -> dict[str, dict[str, Any]]:
    """What a checkpoint is bound to. The data-parallel and the micro-batch size are free.

    The seed and the global batch make the order of samples and the dropout, with which a run goes on.
    """
    return {
        "model": dataclasses.asdict(config.model),
        "run": {"seed": config.training.seed, "global_batch_size": config.global_batch(topology.dp.size)},
        "layout": {"tp": topology.tp.size, "pp": topology.pp.size},
    }


def _read_description(file: Path) -> dict[str, Any]:
    """Reads run.json, whatever is in it.

    Raises:
        ValueError: it is not what `_description` gives.
    """
    description = json.loads(file.read_text())
    if not isinstance(description, dict) or "format" not in description:
        raise ValueError(f"{file.name} is not megalite's")
    if description["format"] != FORMAT:
        raise ValueError(f"it has format {description['format']}, this version reads {FORMAT}")
    progress = description.get("progress")
    whole = (
        isinstance(progress, dict)
        and progress.keys() == {field.name for field in dataclasses.fields(Progress)}
        and all(isinstance(count, int) for count in progress.values())
        and all(isinstance(description.get(part), dict) for part in ("layout", "model", "run"))
    )
    if not whole:
        raise ValueError(f"{file.name} is damaged")
    return description


def _check(description: dict[str, Any], checkpoint: Path, config: Config, topology: Topology) -> None:
    for what, here in _identity(config, topology).items():
        saved = description[what]
        differences = [
            f"{key} {saved.get(key)} (now {here.get(key)})"
            for key in here | saved
            if saved.get(key) != here.get(key)
        ]
        if differences:
            raise UserError(
                f"checkpoint {checkpoint} is of another {what}: {', '.join(differences)}; "
                "run with what it was saved with, or leave out --load"
            )


def _copy_tensors(file: Path, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    with safetensors.safe_open(file, framework="pt", device=str(device)) as saved:
        if differing := sorted(set(saved.keys()) ^ set(tensors)):
            raise UserError(
                f"checkpoint file {file} holds other tensors than this run: {', '.join(differing[:3])} and "
                f"{len(differing[3:])} more are on one side alone; "
                "run with the --pipeline-layers it was saved with, or leave out --load"
            )
        for name, tensor in tensors.items():
            _copy_tensor(name, saved.get_tensor(name), tensor)


@torch.no_grad()
def _copy_tensor(name: str, source: Tensor, target: Tensor) -> None:
    """Copies as is: `copy_` alone would broadcast another shape and round another dtype."""
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"{name} is {source.dtype} {tuple(source.shape)}, here {target.dtype} {tuple(target.shape)}"
        )
    target.copy_(source)


@contextmanager
def _write_errors(checkpoint: Path) -> Iterator[None]:
    """Turns a full or vanished disk into a user's mistake."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"checkpoint {checkpoint} cannot be written ({error}): free space or change --save; "
            "every rank must see the folder"
        ) from error


def _move_folder(source: Path, target: Path) -> None:
    """Renames, in the place of what `target` was; that is deleted only once the new one stands there."""
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    source.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old text or the new."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text + "\n")
    os.replace(aside, path)
