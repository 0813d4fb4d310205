"""Define the source of a conversion, and read our own checkpoints as a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.checkpoint.convert.foreign_files import check_index
from megalite.checkpoint.convert.hf_folder import CONFIG_FILE, HFSource
from megalite.checkpoint.convert.megatron_folder import (
    is_deepspeed,
    is_megatron,
    open_deepspeed,
    open_megatron,
)
from megalite.checkpoint.convert.model_settings import Settings, parameters_of
from megalite.checkpoint.convert.tokenizer_files import TOKENIZER, files_of, model_beside, tokenizer_in
from megalite.checkpoint.folder import iterations_in, list_checkpoints
from megalite.checkpoint.full_tensors import FullReader, check_averages, check_weights
from megalite.checkpoint.manifest import (
    RUN,
    DamagedCheckpoint,
    Manifest,
    damage_of,
    read_manifest,
    saved_config,
)
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config
from megalite.frontends.huggingface.families import RECORDED, recorded_of
from megalite.utils.errors import UserError, few


class ConversionSource(Protocol):
    """Model that is read one tensor at a time.

    Attributes:
        config: config of the model and its tokenizer, in the requested precision.
        progress: progress of its training, if it is known.
        hugging_face: settings of a Hugging Face config.json without a field in the config; None if the model
            did not come from one.
    """

    @property
    def config(self) -> Config: ...

    @property
    def progress(self) -> TrainingProgress: ...

    @property
    def hugging_face(self) -> Mapping[str, Any] | None: ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which the parameter is stored."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return the full parameter under our name, without the vocabulary's padding.

        Raises:
            UserError: it cannot be read, or its shape differs from the config's.
        """
        ...


class MegaliteSource:
    """One of our checkpoints. Only the needed files are read, after they have been verified.

    If the requested precision is not the model's, the main weights are read and rounded once.

    Args:
        ema: read the average of the weights instead of the weights.

    Raises:
        UserError: the checkpoint is damaged, or lacks weights, or an average that is requested.
    """

    def __init__(self, folder: Path, iteration: int | None, settings: Settings, *, ema: bool = False) -> None:
        manifest = read_manifest(find_checkpoint(folder, iteration))
        if ema:
            check_averages(manifest)
        base = _with_moved_tokenizer(saved_config(manifest), manifest.folder.parent / TOKENIZER)
        self.config = settings.applied(base)
        self.progress = TrainingProgress.from_record(manifest.description["progress"])
        is_same = self.config.model.params_dtype == base.model.params_dtype
        recorded = manifest.description.get(RECORDED) or model_beside(base.data)
        self.hugging_face = recorded_of(recorded, settings.change_tokenizer)
        names = parameters_of(self.config.model)
        check_weights(manifest, names.keys(), self.config.model.num_layers)
        self._names = {
            name: f"ema.{name}" if ema and spec.dtype is None else _stored_name(manifest, name, is_same)
            for name, spec in names.items()
        }
        if missing := sorted(set(self._names.values()) - manifest.tensors.keys()):
            raise UserError(f"{manifest.folder} lacks {few(missing)}: it does not hold a whole model")
        pieces = [piece for name in self._names.values() for piece in manifest.tensors[name]]
        if damage := damage_of(manifest, sorted({piece.file for piece in pieces})):
            raise DamagedCheckpoint(manifest.folder, damage)
        self._reader = FullReader(manifest)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._names[name])

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(self._names[name])


def find_checkpoint(folder: Path, iteration: int | None) -> Path:
    """Return the folder of the requested or latest checkpoint, or `folder` if it is a checkpoint itself.

    Raises:
        UserError: there is no such checkpoint.
    """
    if (folder / RUN).is_file() and iteration is None:
        return folder
    try:
        known = iterations_in(folder)
        names = list_checkpoints(folder).names
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    if not names:
        raise UserError(f"{folder} holds no checkpoint of megalite")
    if iteration is None:
        return folder / names[0]
    if iteration not in known:
        raise UserError(f"{folder} has no iteration {iteration}: pass one of {', '.join(map(str, known))}")
    return folder / known[iteration]


class SourceKind(NamedTuple):
    """Kind of folder that can be converted."""

    title: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, int | None, Settings], ConversionSource]


def _is_megalite(folder: Path) -> bool:
    return (folder / RUN).is_file() or any(folder.glob(f"iter_*/{RUN}"))


def _open_hf(folder: Path, iteration: int | None, settings: Settings) -> ConversionSource:
    if iteration is not None:
        raise UserError(
            f"--load-iteration {iteration}: {folder} holds one model, not iterations of a run; remove it"
        )
    return HFSource(folder, settings)


KINDS: Mapping[str, SourceKind] = {
    "megalite": SourceKind("megalite", _is_megalite, MegaliteSource),
    "hf": SourceKind("Hugging Face", lambda folder: (folder / CONFIG_FILE).is_file(), _open_hf),
    "megatron": SourceKind("Megatron-LM", is_megatron, open_megatron),
    "megatron-deepspeed": SourceKind("Megatron-DeepSpeed", is_deepspeed, open_deepspeed),
}
"""Kinds of folders that can be converted, by their name for --from."""


def kind_of(folder: Path) -> str:
    """Return the kind of a folder.

    Raises:
        UserError: it is not a folder, its kind is unknown, or its index is a pickle.
    """
    if not folder.is_dir():
        fault = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"--load {folder} {fault}: pass a folder")
    for name, kind in KINDS.items():
        if kind.matches(folder):
            return name
    check_index(folder)
    if any(folder.glob("*.safetensors")):
        raise UserError(
            f"--load {folder} has weights but no {CONFIG_FILE}: copy the model's {CONFIG_FILE} and its "
            "tokenizer into it"
        )
    raise UserError(
        f"--load {folder} is not a checkpoint of megalite, Megatron-LM or Megatron-DeepSpeed, nor a Hugging "
        "Face folder (config.json and weights): if you know its kind, pass it with --from"
    )


def _with_moved_tokenizer(config: Config, folder: Path) -> Config:
    """Return the config with a converted checkpoint's own tokenizer, even if the folder has been moved."""
    is_there = all(file.is_file() for file in files_of(config.data).values())
    return config if is_there or not folder.is_dir() else replace(config, data=tokenizer_in(folder))


def _stored_name(manifest: Manifest, name: str, is_same: bool) -> str:
    """Return the tensor to read for a parameter: the model's weight, or the more precise main weight."""
    main = f"optimizer.{name}.main"
    return main if not is_same and main in manifest.tensors else f"model.{name}"
