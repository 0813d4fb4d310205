"""What a tool can look at: the tensors of a checkpoint, or of a Hugging Face folder, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.checkpoint.full import FullReader
from megalite.checkpoint.manifest import DamagedCheckpoint, damage_of, read_manifest
from megalite.convert.hf_folder import CONFIG_FILE, HFFolder
from megalite.convert.source import find_checkpoint, kind_of
from megalite.errors import UserError

OF_A_RUN = ("progress", "model", "run", "schedule", "settings", "data", "corpora", "tokenizer")
"""Parts of run.json that make one run another; the rest is where and by what it was saved."""


class View(Protocol):
    """A folder of tensors.

    Attributes:
        folder: the one that holds the files themselves.
        description: what it says of itself, parts by name.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def description(self) -> Mapping[str, Any]: ...

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def files(self, name: str) -> Sequence[str]:
        """Names of the files that hold pieces of a tensor."""
        ...

    def tensor(self, name: str) -> Tensor: ...

    def damage(self, verify: bool) -> list[str]:
        """What is wrong, naming the files; with `verify` every byte is read."""
        ...


class CheckpointView:
    """One of our checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = read_manifest(folder)
        self._reader = FullReader(self._manifest)
        self.description = self._manifest.description

    def names(self) -> Sequence[str]:
        return self._reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(name)

    def files(self, name: str) -> Sequence[str]:
        return sorted({piece.file for piece in self._manifest.tensors[name]})

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name)

    def damage(self, verify: bool) -> list[str]:
        files = self._manifest.files
        absent = [file for file in files if not (self.folder / file).is_file()]
        problems = damage_of(self._manifest, files if verify else absent)
        for name in self.names():
            try:
                self._reader.pieces(name)
            except DamagedCheckpoint as error:
                problems += error.problems
        return list(dict.fromkeys(problems))


class HFView:
    """A Hugging Face folder; it has no digests, so that no damage but what cannot be read is found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = HFFolder(folder)
        self.description = {CONFIG_FILE: self._files.config}

    def names(self) -> Sequence[str]:
        return sorted(self._files.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._files.tensor(name).dtype

    def files(self, name: str) -> Sequence[str]:
        return [self._files.files[name]]

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def damage(self, verify: bool) -> list[str]:
        problems = list[str]()
        for name in self.names():
            try:
                self._files.tensor(name)
            except UserError as error:
                problems.append(str(error))
        return list(dict.fromkeys(problems))


def open_view(folder: Path, iteration: int | None = None) -> View:
    """What is in a folder: of a run's checkpoints the latest, or the one of `iteration`.

    Raises:
        UserError: it is no such folder.
        DamagedCheckpoint: the checkpoint does not say what it holds.
    """
    if folder.is_dir() and (folder / CONFIG_FILE).is_file():
        if iteration is not None:
            raise UserError(f"{folder} is a Hugging Face folder: it has no iterations")
        return HFView(folder)
    kind = kind_of(folder)
    if kind != "megalite":
        raise UserError(f"{folder} is of {kind}: convert it first (tools/convert_checkpoint.py)")
    return CheckpointView(find_checkpoint(folder, iteration))
