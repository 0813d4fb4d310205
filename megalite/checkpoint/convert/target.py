"""Write the target of a conversion: a folder that transformers loads, or one of our checkpoints.

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
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.hf_folder import CONFIG_FILE, WEIGHT_FILES
from megalite.checkpoint.convert.tokenizer_files import (
    GENERATION,
    TOKENIZER,
    end_of_document,
    moved_to,
    read_files,
    settings_of,
    write_files,
)
from megalite.checkpoint.folder import LATEST, name_of
from megalite.checkpoint.manifest import seal
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.save import sync_folder
from megalite.checkpoint.tensor_files import FilePiece, safetensors_header, write_file
from megalite.config import Config, to_yaml
from megalite.data.tokenizers.tokenizer_digest import digest_of
from megalite.distributed.axes import MODEL
from megalite.frontends.huggingface.config import RECORDED, TOKENS, TRAINED, hf_config_of, with_end
from megalite.frontends.huggingface.families import all_entries
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.parameter_spec import ParameterSpec
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json
from megalite.utils.log import log

FileNames = Callable[[int, int], str]


@dataclass(frozen=True)
class TensorInfo:
    """Declares a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class StreamedFile:
    """Writes one file. Its tensors must be added in the order in which they were declared."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._waiting = list(reversed(tensors))
        self._file = path.open("wb")
        declared = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
        self._file.write(safetensors_header(declared, metadata))

    @property
    def is_full(self) -> bool:
        """Return whether every declared tensor was written."""
        return not self._waiting

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor."""
        expected = self._waiting.pop()
        assert expected == TensorInfo(name, tensor.dtype, tuple(tensor.shape)), (expected, name)
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._file.write(content.numpy().data)

    def finish(self) -> None:
        """Close the file once it is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close a file that stays incomplete."""
        self._file.close()


class ShardedWriter:
    """Writes several files of limited size, one after the other; a context manager.

    Args:
        tensors: all tensors, in the order in which they will be added.
        max_bytes: maximum size of a file's tensors, unless a single tensor is larger.
        name_file: returns a file's name for its number, from 1, and the number of files.
        metadata: metadata of each file.

    Attributes:
        files: the tensors of each file, known from the start.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[TensorInfo],
        max_bytes: int,
        name_file: FileNames,
        metadata: Mapping[str, str],
    ) -> None:
        shards = list(_shards(tensors, max_bytes))
        self.files = {name_file(number, len(shards)): shard for number, shard in enumerate(shards, start=1)}
        self._folder = folder
        self._metadata = metadata
        self._waiting = iter(self.files.items())
        self._open: StreamedFile | None = None

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._open is not None:
            self._open.abandon()
        is_whole = self._open is None and next(self._waiting, None) is None
        assert error is not None or is_whole, "declared tensors are missing"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, to the next file if the current one is full."""
        if self._open is None:
            file, shard = next(self._waiting)
            self._open = StreamedFile(self._folder / file, shard, self._metadata)
        self._open.write(name, tensor)
        if self._open.is_full:
            self._open.finish()
            self._open = None


def _shards(tensors: Sequence[TensorInfo], max_bytes: int) -> Iterator[list[TensorInfo]]:
    shard, size = list[TensorInfo](), 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    if shard:
        yield shard


Parameters = Iterator[tuple[str, Tensor]]
"""Full tensors by our name, without padding, in the order of the specs."""


@dataclass(frozen=True)
class ConversionPlan:
    """Plans what to write.

    Attributes:
        specs: every parameter of the model.
        max_bytes: maximum size of a file of weights, if the format has several.
        final: the folder's name once it is complete.
        hugging_face: as in `Source`.
    """

    config: Config
    progress: TrainingProgress
    specs: Mapping[str, ParameterSpec]
    max_bytes: int
    final: Path
    hugging_face: Mapping[str, Any] | None = None

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


def write_hf(folder: Path, plan: ConversionPlan, parameters: Parameters) -> None:
    """Write config.json, weights in safetensors files, and the tokenizer's files."""
    model, data = plan.config.model, plan.config.data
    tokenizer = read_files(data)
    model_type = (plan.hugging_face or {}).get("model_type")
    entries = {entry.ours: entry for entry in all_entries(model, model_type)}
    tensors = list[TensorInfo]()
    for name, spec in plan.specs.items():
        dtype = plan.dtype_of(name)
        shape_only = torch.empty(spec.used_shape, dtype=dtype, device="meta")
        for theirs, part in entries[name].to_hf(shape_only, model).items():
            tensors.append(TensorInfo(theirs, dtype, tuple(part.shape)))
    with ShardedWriter(folder, tensors, plan.max_bytes, _file_name, {"format": "pt"}) as writer:
        for name, full in parameters:
            for theirs, part in entries[name].to_hf(full, model).items():
                writer.write(theirs, part)
    if len(writer.files) > 1:
        _write_json(folder / f"{WEIGHT_FILES[0]}.index.json", _index(writer, plan.num_bytes))
    if tokenizer:
        write_files(tokenizer, folder)
        for name, settings in settings_of(data).items():
            if name not in tokenizer:
                _write_json(folder / name, settings)
    eod = end_of_document(data, model.vocab_size) if model.is_causal else None
    _write_json(folder / CONFIG_FILE, hf_config_of(model, eod, plan.hugging_face))
    if GENERATION in tokenizer and eod is not None and (plan.hugging_face or {}).get(TOKENS) == TRAINED:
        generation = parse_json(tokenizer[GENERATION])
        ids = generation.get("eos_token_id")
        if (ends := with_end(ids, eod)) != ids:
            _write_json(folder / GENERATION, {**generation, "eos_token_id": ends})


def write_megalite(folder: Path, plan: ConversionPlan, parameters: Parameters) -> None:
    """Write a folder with one checkpoint: only the weights, in a file per layer, and the tokenizer."""
    data = plan.config.data
    tokenizer = read_files(data)
    name = name_of(plan.progress.iteration)
    checkpoint = folder / name
    checkpoint.mkdir()
    files = []
    for number, (unit, group) in enumerate(groupby(parameters, lambda pair: _unit(pair[0]))):
        pieces = {f"model.{name}": FilePiece(full, _full_range(plan.specs[name])) for name, full in group}
        files.append(write_file(checkpoint / f"weights_{number:04d}_{unit}.safetensors", pieces))
        pieces.clear()  # before the next unit is read
    if tokenizer:
        write_files(tokenizer, folder / TOKENIZER)
        if plan.hugging_face is not None:  # a run that continues from here keeps these files, not run.json
            _write_json(folder / TOKENIZER / CONFIG_FILE, plan.hugging_face)
        data = moved_to(data, plan.final.absolute() / TOKENIZER)
    seal(
        checkpoint,
        _description(plan, has_tokenizer=bool(tokenizer)),
        to_yaml(replace(plan.config, data=data)),
        files,
    )
    sync_folder(checkpoint)
    (folder / LATEST).write_text(f"{name}\n")


TARGETS: Mapping[str, Callable[[Path, ConversionPlan, Parameters], None]] = {
    "hf": write_hf,
    "megalite": write_megalite,
}
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
    """Return the part of the model that a parameter's file is named after, such as a layer."""
    first, second = name.split(".")[:2]
    return f"layer{second}" if first == "layers" else first


def _full_range(spec: ParameterSpec) -> ParameterRange:
    """Return the range of a whole parameter; `dim` is the dimension along which layouts cut it."""
    shape = spec.used_shape
    return ParameterRange.whole(shape)


def _description(plan: ConversionPlan, *, has_tokenizer: bool) -> dict[str, object]:
    """Return run.json. Without a run in the source it names none, so that any run can continue from it."""
    config = plan.config
    training = config.training
    run: dict[str, object] = {}
    if plan.progress.consumed_samples and training.global_batch_size is not None:
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
        "progress": asdict(plan.progress),
        "layout": dict.fromkeys(MODEL.names, 1),
        "model": asdict(config.model),
        "run": run,
        "tokenizer": digest,
        RECORDED: plan.hugging_face,
    }


def _file_name(number: int, count: int) -> str:
    stem, _, ending = WEIGHT_FILES[0].rpartition(".")
    return WEIGHT_FILES[0] if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{ending}"


def _index(writer: ShardedWriter, num_bytes: int) -> dict[str, object]:
    files = {tensor.name: file for file, shard in writer.files.items() for tensor in shard}
    return {"metadata": {"total_size": num_bytes}, "weight_map": files}


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
