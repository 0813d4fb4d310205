"""Write the target of a conversion: a folder that transformers loads, or one of our checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.hf_folder import CONFIG_FILE, WEIGHT_FILES
from megalite.checkpoint.convert.stream_writer import ShardedWriter, TensorInfo
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
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import Config, to_yaml
from megalite.data.tokenizers.tokenizer_digest import digest_of
from megalite.distributed.axes import MODEL
from megalite.errors import UserError
from megalite.files import parse_json
from megalite.frontends.huggingface.config import RECORDED, TOKENS, TRAINED, hf_config_of, with_end
from megalite.frontends.huggingface.families import all_entries
from megalite.log import log
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.parameter_spec import ParameterSpec

Parameters = Iterator[tuple[str, Tensor]]
"""Full tensors by our name, without padding, in the order of the specs."""


@dataclasses.dataclass(frozen=True)
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
        to_yaml(dataclasses.replace(plan.config, data=data)),
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
        "progress": dataclasses.asdict(plan.progress),
        "layout": dict.fromkeys(MODEL.names, 1),
        "model": dataclasses.asdict(config.model),
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
