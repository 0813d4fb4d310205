"""Where a conversion writes to: a folder that transformers loads, or a checkpoint of ours."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.checkpoint.folder import LATEST, name_of
from megalite.checkpoint.manifest import seal
from megalite.checkpoint.place import Place
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import sync_folder
from megalite.checkpoint.tensor_writer import Piece, write_file
from megalite.config import Config, to_yaml
from megalite.convert.hf import all_entries
from megalite.convert.hf_config import RECORDED
from megalite.convert.hf_config_writer import hf_config_of
from megalite.convert.hf_folder import CONFIG_FILE, WEIGHT_FILES
from megalite.convert.stream_writer import Announced, ShardedWriter
from megalite.convert.tokenizer_files import TOKENIZER, copy_files, end_of_document, moved_to, usable_files
from megalite.data.tokenizer_digest import digest_of
from megalite.errors import UserError
from megalite.log import log
from megalite.model.stage import DTYPES
from megalite.parallel.shard import ParameterSpec
from megalite.topology import AXES

Parameters = Iterator[tuple[str, Tensor]]
"""Full tensors by our name, without padding, in the order of the specs."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be written.

    Attributes:
        specs: every parameter of the model.
        max_bytes: of one file of weights, where the form leaves that free.
        final: what the folder will be called once it is whole.
        hugging_face: as the source has it.
    """

    config: Config
    progress: Progress
    specs: Mapping[str, ParameterSpec]
    max_bytes: int
    final: Path
    hugging_face: Mapping[str, Any] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.params_dtype]

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        elements = sum(torch.Size(spec.used_shape).numel() for spec in self.specs.values())
        return elements * self.dtype.itemsize


class Target(Protocol):
    """Writes a model to a folder that is there and empty."""

    def __call__(self, folder: Path, order: Order, parameters: Parameters) -> None: ...


def write_hf(folder: Path, order: Order, parameters: Parameters) -> None:
    """Writes config.json, weights in safetensors files, and the tokenizer's files."""
    model, data = order.config.model, order.config.data
    entries = {entry.ours: entry for entry in all_entries(model)}
    announced = list[Announced]()
    for name, spec in order.specs.items():
        shape_only = torch.empty(spec.used_shape, dtype=order.dtype, device="meta")
        for theirs, part in entries[name].to_hf(shape_only, model).items():
            announced.append(Announced(theirs, order.dtype, tuple(part.shape)))
    with ShardedWriter(folder, announced, order.max_bytes, _file_name, {"format": "pt"}) as writer:
        for name, full in parameters:
            for theirs, part in entries[name].to_hf(full, model).items():
                writer.write(theirs, part)
    if len(writer.files) > 1:
        _write_json(folder / f"{WEIGHT_FILES[0]}.index.json", _index(writer, order.num_bytes))
    copy_files(usable_files(data), folder)
    config = hf_config_of(model, end_of_document(data, model.vocab_size), order.hugging_face)
    _write_json(folder / CONFIG_FILE, config)


def write_megalite(folder: Path, order: Order, parameters: Parameters) -> None:
    """Writes a folder of one checkpoint, of weights alone and a file a layer, and the tokenizer's files."""
    name = name_of(order.progress.iteration)
    checkpoint = folder / name
    checkpoint.mkdir()
    files = []
    for number, (unit, group) in enumerate(groupby(parameters, lambda pair: _unit(pair[0]))):
        pieces = {f"model.{name}": Piece(full, _place(order.specs[name])) for name, full in group}
        files.append(write_file(checkpoint / f"weights_{number:04d}_{unit}.safetensors", pieces))
    data = order.config.data
    if tokenizer := usable_files(data):
        copy_files(tokenizer, folder / TOKENIZER)
        data = moved_to(data, order.final.absolute() / TOKENIZER)
    seal(
        checkpoint,
        _description(order, has_tokenizer=bool(tokenizer)),
        to_yaml(dataclasses.replace(order.config, data=data)),
        files,
    )
    sync_folder(checkpoint)
    (folder / LATEST).write_text(f"{name}\n")


TARGETS: Mapping[str, Target] = {"hf": write_hf, "megalite": write_megalite}
"""What can be converted to, by the name that --to takes."""


@contextmanager
def whole_folder(final: Path, num_bytes: int) -> Iterator[Path]:
    """A folder to write to, which gets its name once the block is through; nothing stays if it fails.

    Args:
        final: not there, or empty.
        num_bytes: that will be written at least.

    Raises:
        UserError: there is something already, another conversion writes to it, no space, or no permission.
    """
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"--save {final} is there and not empty: give a new folder, or delete it first")
    aside = final.with_name(f".{final.name}.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    except FileExistsError:
        raise UserError(
            f"--save {final} is being written by another conversion, or one was killed: delete {aside} "
            "if none is running"
        ) from None
    except OSError as error:
        raise UserError(f"--save {final} cannot be written: {error}") from error
    try:
        free = shutil.disk_usage(aside).free
        if free < num_bytes:
            raise UserError(
                f"--save {final} needs {size_text(num_bytes)} and {size_text(free)} are free: give a folder "
                "on another disk"
            )
        yield aside
        sync_folder(aside)
        aside.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        raise UserError(f"--save {final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def size_text(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.2f} MB"


def _unit(name: str) -> str:
    """Parameters of one file: a layer's, or those of a part before or after the layers."""
    words = name.split(".")
    return "layer" + words[1] if words[0] == "layers" else words[0]


def _place(spec: ParameterSpec) -> Place:
    """All of a parameter; `dim` is the one that layouts cut it along."""
    shape = spec.used_shape
    return Place(shape, spec.shard.dim if spec.shard else 0, 0, shape, 0, torch.Size(shape).numel())


def _description(order: Order, *, has_tokenizer: bool) -> dict[str, object]:
    """What run.json tells: nothing of a run, where the source knows none, so that any may go on from it."""
    config = order.config
    training = config.training
    run: dict[str, object] = {}
    if order.progress.consumed_samples and training.global_batch_size is not None:
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
            log.warning("the tokenizer's digest is left out: %s", error)
    return {
        "progress": dataclasses.asdict(order.progress),
        "layout": dict.fromkeys(AXES, 1),
        "model": dataclasses.asdict(config.model),
        "run": run,
        "tokenizer": digest,
        RECORDED: order.hugging_face,
    }


def _file_name(number: int, count: int) -> str:
    stem, _, ending = WEIGHT_FILES[0].rpartition(".")
    return WEIGHT_FILES[0] if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{ending}"


def _index(writer: ShardedWriter, num_bytes: int) -> dict[str, object]:
    files = {tensor.name: file for file, shard in writer.files.items() for tensor in shard}
    return {"metadata": {"total_size": num_bytes}, "weight_map": files}


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
