"""The formats of a conversion: how a model is read from one, and written as a Hugging Face folder or as ours.

Safetensors files are written one tensor at a time, so that at most one tensor is in memory. The format begins
with a header of names, shapes and dtypes, so all tensors are declared before any is written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.checkpoint.convert.foreign_files import check_index
from megalite.checkpoint.convert.hf_folder import CONFIG_FILE, WEIGHT_FILES, HFSource
from megalite.checkpoint.convert.megatron_folder import (
    is_deepspeed,
    is_megatron,
    open_deepspeed,
    open_megatron,
)
from megalite.checkpoint.convert.model_settings import Settings, parameters_of, rounded
from megalite.checkpoint.convert.tokenizer_files import (
    GENERATION,
    TOKENIZER,
    end_of_document,
    files_of,
    model_beside,
    moved_to,
    read_files,
    settings_of,
    tokenizer_in,
    write_files,
)
from megalite.checkpoint.folder import LATEST, iterations_in, list_checkpoints, name_of, sync_folder
from megalite.checkpoint.full_tensors import FullReader, check_averages, check_weights
from megalite.checkpoint.manifest import (
    RUN,
    DamagedCheckpoint,
    Manifest,
    damage_of,
    read_manifest,
    saved_config,
    seal,
)
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.tensor_files import FilePiece, safetensors_header, write_file
from megalite.config import Config, to_yaml
from megalite.data.tokenizers.tokenizer import digest_of
from megalite.distributed.axes import MODEL
from megalite.frontends.huggingface.families import (
    RECORDED,
    TOKENS,
    TRAINED,
    all_entries,
    hf_config_of,
    recorded_of,
    with_end,
)
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.parameter_spec import ParameterSpec
from megalite.utils.errors import UserError, few
from megalite.utils.files import parse_json
from megalite.utils.log import LineInterval, log


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


@dataclass(frozen=True)
class ConversionPlan:
    """Model of a source, and the new folder that it is written to.

    Attributes:
        final: the folder's name once it is complete.
        max_bytes: maximum size of a file of weights, if the format has several.
    """

    source: ConversionSource
    final: Path
    max_bytes: int = 0

    @property
    def config(self) -> Config:
        return self.source.config

    @cached_property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """Return every parameter of the model."""
        return parameters_of(self.config.model)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.params_dtype]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a written tensor: buffers have their own."""
        return self.specs[name].dtype or self.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights."""
        elements = sum(torch.Size(spec.used_shape).numel() for spec in self.specs.values())
        return elements * self.dtype.itemsize

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full parameters in the dtypes of the target; log the progress of long conversions.

        Raises:
            UserError: a parameter does not have the shape of the config, or is too large for the dtype.
        """
        done, interval = 0, LineInterval()
        for name, spec in self.specs.items():
            full = self.source.tensor(name)
            if tuple(full.shape) != tuple(spec.used_shape):
                raise UserError(
                    f"{name} is {list(full.shape)}, but the config says {list(spec.used_shape)}: does the "
                    "config belong to another model?"
                )
            full = rounded(name, full, self.dtype_of(name))
            yield name, full
            done += full.nbytes
            if interval.is_over():
                sizes = size_text(done), size_text(self.num_bytes)
                log.info("%s of %s (%.0f%%), at %s", *sizes, 100 * done / self.num_bytes, name)


class TensorInfo(NamedTuple):
    """Tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_shards(
    folder: Path, declared: Sequence[TensorInfo], tensors: Iterator[tuple[str, Tensor]], max_bytes: int
) -> dict[str, str]:
    """Write tensors to files of limited size, and return the file of each tensor.

    Args:
        declared: all tensors, in the order in which `tensors` yields them.
        max_bytes: maximum size of a file's tensors, unless a single tensor is larger.
    """
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in declared:
        num_bytes = info.dtype.itemsize * math.prod(info.shape)
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += num_bytes
    stem, _, ending = WEIGHT_FILES[0].rpartition(".")
    file_of = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHT_FILES[0] if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{ending}"
        with (folder / file).open("wb") as stream:
            stream.write(safetensors_header(shard, {"format": "pt"}))
            for info in shard:
                name, tensor = next(tensors)
                assert info == (name, tensor.dtype, tuple(tensor.shape)), (info, name)
                stream.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
                file_of[name] = file
            stream.flush()
            os.fsync(stream.fileno())
    return file_of


def write_hf(folder: Path, plan: ConversionPlan) -> None:
    """Write config.json, weights in safetensors files, and the tokenizer's files."""
    model, data, recorded = plan.config.model, plan.config.data, plan.source.hugging_face or {}
    tokenizer = read_files(data)
    entries = {entry.ours: entry for entry in all_entries(model, recorded.get("model_type"))}
    declared = list[TensorInfo]()
    for name, spec in plan.specs.items():
        shape_only = torch.empty(spec.used_shape, dtype=plan.dtype_of(name), device="meta")
        for theirs, part in entries[name].to_hf(shape_only, model).items():
            declared.append(TensorInfo(theirs, part.dtype, tuple(part.shape)))
    tensors = (pair for name, full in plan.parameters() for pair in entries[name].to_hf(full, model).items())
    file_of = write_shards(folder, declared, tensors, plan.max_bytes)
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": plan.num_bytes}, "weight_map": file_of}
        _write_json(folder / f"{WEIGHT_FILES[0]}.index.json", index)
    if tokenizer:
        write_files(tokenizer, folder)
        for name, settings in settings_of(data).items():
            if name not in tokenizer:
                _write_json(folder / name, settings)
    eod = end_of_document(data, model.vocab_size) if model.is_causal else None
    _write_json(folder / CONFIG_FILE, hf_config_of(model, eod, plan.source.hugging_face))
    if GENERATION in tokenizer and eod is not None and recorded.get(TOKENS) == TRAINED:
        generation = parse_json(tokenizer[GENERATION])
        ids = generation.get("eos_token_id")
        if (ends := with_end(ids, eod)) != ids:
            _write_json(folder / GENERATION, {**generation, "eos_token_id": ends})


def write_megalite(folder: Path, plan: ConversionPlan) -> None:
    """Write a folder with one checkpoint: only the weights, in a file per layer, and the tokenizer."""
    data = plan.config.data
    tokenizer = read_files(data)
    name = name_of(plan.source.progress.iteration)
    checkpoint = folder / name
    checkpoint.mkdir()
    files = []
    for number, (unit, group) in enumerate(groupby(plan.parameters(), lambda pair: _unit(pair[0]))):
        pieces = {
            f"model.{name}": FilePiece(full, ParameterRange.whole(tuple(full.shape))) for name, full in group
        }
        files.append(write_file(checkpoint / f"weights_{number:04d}_{unit}.safetensors", pieces))
        pieces.clear()  # before the next unit is read
    if tokenizer:
        write_files(tokenizer, folder / TOKENIZER)
        if plan.source.hugging_face is not None:  # a run that continues from here keeps them, not run.json
            _write_json(folder / TOKENIZER / CONFIG_FILE, plan.source.hugging_face)
        data = moved_to(data, plan.final.absolute() / TOKENIZER)
    seal(
        checkpoint,
        _description(plan, has_tokenizer=bool(tokenizer)),
        to_yaml(replace(plan.config, data=data)),
        files,
    )
    sync_folder(checkpoint)
    (folder / LATEST).write_text(f"{name}\n")


TARGETS: Mapping[str, Callable[[Path, ConversionPlan], None]] = {"hf": write_hf, "megalite": write_megalite}
"""Functions that write to an existing empty folder, by name for --to."""


@contextmanager
def whole_folder(final: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a folder to write to; it is renamed to `final` when the block ends, and deleted if that fails.

    Args:
        final: a folder that does not exist, or is empty.
        num_bytes: number of bytes that will be written, at least.

    Raises:
        UserError: the folder is not empty, another conversion writes to it, or space or permission is
            missing.
    """
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"--save {final} exists and is not empty: pass a new folder, or delete it first")
    partial = final.with_name(f".{final.name}.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except FileExistsError:
        raise UserError(
            f"--save {final} is being written by another conversion, or one was killed: delete {partial} "
            "if none is running"
        ) from None
    except OSError as error:
        raise UserError(f"--save {final} cannot be written: {error}") from error
    try:
        free = shutil.disk_usage(partial).free
        if free < num_bytes:
            raise UserError(
                f"--save {final} needs {size_text(num_bytes)} and {size_text(free)} are free: pass a folder "
                "on another disk"
            )
        yield partial
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        raise UserError(f"--save {final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.2f} MB"


def _unit(name: str) -> str:
    first, second = name.split(".")[:2]
    return f"layer{second}" if first == "layers" else first


def _description(plan: ConversionPlan, *, has_tokenizer: bool) -> dict[str, object]:
    """Return run.json. Without a run in the source it names none, so that any run can continue from it."""
    config, progress = plan.config, plan.source.progress
    training = config.training
    run: dict[str, object] = {}
    if progress.consumed_samples and training.global_batch_size is not None:
        run = {
            "seed": training.seed,
            "global_batch_size": training.global_batch_size,
            "rampup_batch_size": list(training.rampup_batch_size or []) or None,
        }
    digest: str | None = None
    if has_tokenizer:
        try:
            digest = digest_of(config.data, config.model.vocab_size)
        except UserError as error:
            log.warning("the tokenizer's digest is not recorded: %s", error)
    return {
        "progress": asdict(progress),
        "layout": dict.fromkeys(MODEL.names, 1),
        "model": asdict(config.model),
        "run": run,
        "tokenizer": digest,
        RECORDED: plan.source.hugging_face,
    }


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
