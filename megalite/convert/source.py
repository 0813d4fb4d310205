"""Where a conversion reads from: what every kind of source offers, and a checkpoint of ours as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.checkpoint.folder import iterations_in, list_checkpoints
from megalite.checkpoint.full import FullReader, check_weights
from megalite.checkpoint.manifest import CONFIG, RUN, DamagedCheckpoint, Manifest, damage_of, read_manifest
from megalite.checkpoint.progress import Progress
from megalite.cli import parse
from megalite.config import Config
from megalite.convert.hf_config import RECORDED, recorded_of
from megalite.convert.hf_folder import CONFIG_FILE, HFSource
from megalite.convert.megatron_deepspeed import find_in_deepspeed, is_deepspeed
from megalite.convert.megatron_folder import find_in_megatron, is_megatron
from megalite.convert.megatron_source import MegatronSource
from megalite.convert.parameters import parameters_of
from megalite.convert.settings import Settings
from megalite.convert.tokenizer_files import TOKENIZER, files_of, tokenizer_in
from megalite.errors import ConfigError, UserError


class Source(Protocol):
    """A model that is read one tensor at a time.

    Attributes:
        config: of the model and its tokenizer, in the precision that it is to have.
        progress: how far its training had come, where that is known.
        hugging_face: settings of a Hugging Face config.json that the config has no field for; None where the
            model did not come from one.
    """

    @property
    def config(self) -> Config: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def hugging_face(self) -> Mapping[str, Any] | None: ...

    def dtype_of(self, name: str) -> torch.dtype:
        """What the parameter is stored in."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The full parameter under our name, without the vocabulary's padding.

        Raises:
            UserError: it cannot be read, or has not the shape that the config says.
        """
        ...


class MegaliteSource:
    """A checkpoint of ours, whose files were found whole. Only the files that are needed are read.

    Where another precision is asked for than the model's, the main weights are taken, and rounded once.

    Raises:
        UserError: it is damaged, or lacks weights.
    """

    def __init__(self, folder: Path, iteration: int | None, settings: Settings) -> None:
        manifest = read_manifest(find_checkpoint(folder, iteration))
        base = _with_moved_tokenizer(_config_of(manifest), manifest.folder.parent / TOKENIZER)
        self.config = settings.applied(base)
        self.progress = Progress.from_record(manifest.description["progress"])
        is_same = self.config.model.params_dtype == base.model.params_dtype
        self.hugging_face = recorded_of(manifest.description.get(RECORDED), settings)
        names = parameters_of(self.config.model)
        check_weights(manifest, names.keys(), self.config.model.num_layers)
        self._names = {name: _stored_name(manifest, name, is_same) for name in names}
        if missing := sorted(set(self._names.values()) - manifest.tensors.keys()):
            raise UserError(f"{manifest.folder} lacks {', '.join(missing[:3])}: it holds no whole model")
        pieces = [piece for name in self._names.values() for piece in manifest.tensors[name]]
        if damage := damage_of(manifest, sorted({piece.file for piece in pieces})):
            raise DamagedCheckpoint(manifest.folder, damage)
        self._reader = FullReader(manifest)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._names[name])

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(self._names[name])


def find_checkpoint(folder: Path, iteration: int | None) -> Path:
    """One checkpoint's folder: that of the iteration, the latest, or the given one if it is one itself.

    Raises:
        UserError: there is none.
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
        raise UserError(f"{folder} has no iteration {iteration}: it has {', '.join(map(str, known))}")
    return folder / known[iteration]


@dataclass(frozen=True)
class Kind:
    """A form of folder that can be converted from."""

    title: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, int | None, Settings], Source]


def _is_megalite(folder: Path) -> bool:
    return (folder / RUN).is_file() or any(folder.glob(f"iter_*/{RUN}"))


def _open_hf(folder: Path, iteration: int | None, settings: Settings) -> Source:
    if iteration is not None:
        raise UserError(f"--load-iteration {iteration}: {folder} holds one model, not iterations of a run")
    return HFSource(folder, settings)


KINDS: Mapping[str, Kind] = {
    "megalite": Kind("megalite", _is_megalite, MegaliteSource),
    "hf": Kind("Hugging Face", lambda folder: (folder / CONFIG_FILE).is_file(), _open_hf),
    "megatron": Kind(
        "Megatron-LM",
        is_megatron,
        lambda folder, iteration, settings: MegatronSource(find_in_megatron(folder, iteration), settings),
    ),
    "megatron-deepspeed": Kind(
        "Megatron-DeepSpeed",
        is_deepspeed,
        lambda folder, iteration, settings: MegatronSource(find_in_deepspeed(folder, iteration), settings),
    ),
}
"""What can be converted from, by the name that --from takes."""


def kind_of(folder: Path) -> str:
    """What form a folder has.

    Raises:
        UserError: it is no folder, or of no known form.
    """
    if not folder.is_dir():
        raise UserError(
            f"--load {folder} is {'no folder' if folder.exists() else 'not there'}: give a folder"
        )
    for name, kind in KINDS.items():
        if kind.matches(folder):
            return name
    raise UserError(
        f"--load {folder} is no checkpoint of megalite, Megatron-LM or Megatron-DeepSpeed, and no Hugging "
        "Face folder (config.json and weights): where you know what it is, say so by --from"
    )


def _config_of(manifest: Manifest) -> Config:
    try:
        config, _ = parse(["--config", str(manifest.folder / CONFIG)])
    except ConfigError as error:
        raise DamagedCheckpoint(manifest.folder, error.problems) from None
    return config


def _with_moved_tokenizer(config: Config, folder: Path) -> Config:
    """The config with the tokenizer of a converted checkpoint, where its folder has been moved since."""
    is_there = all(file.is_file() for file in files_of(config.data).values())
    return config if is_there or not folder.is_dir() else replace(config, data=tokenizer_in(folder))


def _stored_name(manifest: Manifest, name: str, is_same: bool) -> str:
    """The tensor to take for a parameter: the model's weight, or the main weight where that is better."""
    main = f"optimizer.{name}.main"
    return main if not is_same and main in manifest.tensors else f"model.{name}"
