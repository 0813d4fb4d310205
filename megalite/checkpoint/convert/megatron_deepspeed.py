"""Read Megatron-DeepSpeed's checkpoints, as BLOOM's: SAVE/global_step95000/layer_03-model_00-model_states.pt.

There is a file for each pipeline layer (03) and tensor-parallel rank (00): the embedding, the transformer's
layers, and the last norm. Layers without weights have no file. The optimizer's files are not read, so the
weights are in 16 bits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.convert.foreign_files import open_weights, read_name, read_pickled
from megalite.checkpoint.convert.megatron_folder import ModelChunk, shards_of
from megalite.checkpoint.convert.megatron_model import MegatronCheckpoint
from megalite.errors import UserError

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.(pt|safetensors)")
_STATES = "mp_rank_00_model_states.pt"
_STEP = "global_step"


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder looks like Megatron-DeepSpeed's, for all iterations or for one."""
    return any(folder.glob("layer_*-model_*-model_states.*")) or any(folder.glob(f"{_STEP}*"))


def find_in_deepspeed(folder: Path, iteration: int | None) -> MegatronCheckpoint:
    """Open all of a checkpoint's layer files. Their tensors are memory-mapped, not read.

    Raises:
        UserError: there is no such checkpoint, or one of its files is missing or cannot be read.
    """
    folder = _step_folder(folder, iteration)
    layers = _read_layers(folder)
    arguments, why_unread, saved_iteration = None, "", 0
    try:
        arguments, saved_iteration = _read_arguments(folder)
    except UserError as error:
        why_unread = str(error)
    return MegatronCheckpoint(
        folder=str(folder),
        shards=shards_of([_one_chunk(layers)], str(folder)),
        arguments=arguments,
        version=3.0,
        iteration=saved_iteration,
        why_unread=why_unread,
    )


def _step_folder(folder: Path, iteration: int | None) -> Path:
    if iteration is not None:
        chosen = folder / f"{_STEP}{iteration}"
    elif any(folder.glob("layer_*-model_*")):
        return folder
    elif (folder / "latest").is_file():
        chosen = folder / Path(read_name(folder / "latest")).name
    else:
        steps = sorted(folder.glob(f"{_STEP}*"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
        chosen = steps[-1]
    if not chosen.is_dir():
        known = ", ".join(sorted(path.name for path in folder.glob(f"{_STEP}*"))) or "none"
        raise UserError(f"{chosen} does not exist: the folder has the iterations {known}")
    return chosen


def _read_layers(folder: Path) -> list[list[Mapping[str, Tensor]]]:
    """Return the layers in order, each on every tensor-parallel rank."""
    files: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if match := _LAYER.fullmatch(path.name):
            files[int(match[1])][int(match[2])] = path
    if not files:
        raise UserError(f"{folder} has no layer_*-model_*-model_states.pt of Megatron-DeepSpeed")
    num_tp = 1 + max(tp for ranks in files.values() for tp in ranks)
    for layer, ranks in files.items():
        if missing := set(range(num_tp)) - ranks.keys():
            raise UserError(f"{folder} lacks layer_{layer:02d}-model_{min(missing):02d}-model_states.pt")
    return [[open_weights(files[layer][tp]) for tp in range(num_tp)] for layer in sorted(files)]


def _one_chunk(layers: list[list[Mapping[str, Tensor]]]) -> ModelChunk:
    """Return all layers as a single part of a model, with Megatron-LM's names."""
    parts: list[dict[str, Tensor]] = [{} for _ in layers[0]]
    num_layers = 0
    for ranks in layers:
        is_layer = any(name.startswith(("input_layernorm", "self_attention")) for name in ranks[0])
        for part, tensors in zip(parts, ranks, strict=True):
            for name in tensors:
                part[f"layers.{num_layers}.{name}" if is_layer else _end_name(name)] = tensors[name]
        num_layers += is_layer
    return parts


def _end_name(name: str) -> str:
    # The last norm is a separate pipeline layer, whose tensors are just called weight and bias.
    return f"final_layernorm.{name}" if name in ("weight", "bias") else name


def _read_arguments(folder: Path) -> tuple[Mapping[str, Any] | None, int]:
    """Return the run's arguments and its iteration, if they can be read."""
    if not (folder / _STATES).exists():
        return None, 0
    state = read_pickled(folder / _STATES, allow_inert=True)
    if not isinstance(state, Mapping):
        return None, 0
    arguments = state.get("args")
    return None if arguments is None else vars(arguments), int(state.get("iteration", 0))
