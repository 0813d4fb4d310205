"""Read the checkpoints of Megatron-LM and Megatron-DeepSpeed.

Megatron-LM's are SAVE/iter_0000100/mp_rank_00_001/model_optim_rng.pt and the like: a file for each
tensor-parallel (00) and pipeline rank (001). It holds a dict with ``model``, or with ``model0``,
``model1``, ... if the pipeline is interleaved.

Megatron-DeepSpeed's, as BLOOM's, are SAVE/global_step95000/layer_03-model_00-model_states.pt: a file for each
pipeline layer (03) and tensor-parallel rank (00): the embedding, the transformer's layers, and the last norm.
Layers without weights have no file. The optimizer's files are not read, so the weights are in 16 bits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.convert.foreign_files import SafetensorsFile, open_weights, read_name, read_pickled
from megalite.checkpoint.convert.megatron_model import MegatronSource, flattened, our_name
from megalite.checkpoint.convert.model_settings import Settings
from megalite.utils.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_FILES = ("model_optim_rng.safetensors", "model_optim_rng.pt", "model_rng.safetensors", "model_rng.pt")
_NEW_FORMAT = ("common.pt", "metadata.json")
"""Files of the distributed format, besides those of torch.distributed.checkpoint."""

State = Mapping[str, Any]
ModelChunk = Sequence[Mapping[str, Tensor]]
"""A part of the model on each tensor-parallel rank: tensors by Megatron's name."""


def is_megatron(folder: Path) -> bool:
    """Return whether a folder looks like Megatron-LM's, for all iterations or for one."""
    return (
        (folder / TRACKER).is_file() or any(folder.glob("mp_rank_*/model_*rng.*")) or _has_new_files(folder)
    )


def open_megatron(folder: Path, iteration: int | None, settings: Settings) -> MegatronSource:
    """Open all of a checkpoint's files. Their tensors are memory-mapped, not read.

    Raises:
        UserError: there is no such checkpoint, one of its files cannot be read, or megalite does not have the
            model.
    """
    folder = _iteration_folder(folder, iteration)
    is_dcp = (folder / ".metadata").is_file() or any(folder.glob("*.distcp"))
    if is_dcp or _has_new_files(folder):
        raise UserError(
            f"{folder} has Megatron's distributed format, whose index is a pickle: save it with "
            "--ckpt-format torch (Megatron's --ckpt-convert-format torch rewrites one) and convert that"
        )
    states = _read_states(folder)
    first = states[0, 0]
    arguments = first.get("args")
    return MegatronSource(
        settings,
        folder=str(folder),
        shards=shards_of(list(_chunks(states)), str(folder)),
        arguments=arguments if arguments is None or isinstance(arguments, Mapping) else vars(arguments),
        version=float(first.get("checkpoint_version", 0)),
        iteration=int(first.get("iteration", 0)),
    )


def shards_of(chunks: Sequence[ModelChunk], folder: str) -> dict[str, list[Tensor]]:
    """Return each parameter's shards, by our name. Each chunk's layers follow the previous chunk's.

    Raises:
        UserError: our model has no such parameter, or not every tensor-parallel rank has it.
    """
    shards: dict[str, list[Tensor]] = {}
    num_layers = 0
    for chunk in chunks:
        here: dict[str, list[Tensor]] = defaultdict(list)
        layers = {-1}
        for state in chunk:
            for theirs, tensor in state.items():
                try:
                    known = our_name(theirs)
                except KeyError:
                    raise UserError(f"{folder} has {theirs}, which megalite's model does not have") from None
                if known is not None:
                    name, layer = known
                    layers.add(-1 if layer is None else layer)
                    here[name.format(None if layer is None else num_layers + layer)].append(tensor)
        if uneven := [name for name, tensors in here.items() if len(tensors) != len(chunk)]:
            raise UserError(
                f"{folder} does not have {uneven[0]} on every tensor-parallel rank: are files missing?"
            )
        shards.update(here)
        num_layers += max(layers) + 1
    return shards


def _iteration_folder(folder: Path, iteration: int | None) -> Path:
    if iteration is not None:
        chosen = folder / f"iter_{iteration:07d}"
    elif (folder / TRACKER).is_file():
        text = read_name(folder / TRACKER)
        chosen = folder / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    else:
        return folder
    if not chosen.is_dir():
        known = ", ".join(sorted(path.name for path in folder.glob("iter_*"))) or "none"
        raise UserError(f"{chosen} does not exist: the folder has the iterations {known}")
    return chosen


def _has_new_files(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _NEW_FORMAT)


def _read_states(folder: Path) -> dict[tuple[int, int], State]:
    """Return each file's content, by pipeline and tensor-parallel rank."""
    states: dict[tuple[int, int], State] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None:
            raise UserError(
                f"{path} belongs to a mixture of experts: of these, only Hugging Face's format is converted"
            )
        states[int(match[2] or 0), int(match[1])] = _read_state(path)
    if not states:
        raise UserError(f"{folder} has no mp_rank_* folders of Megatron-LM")
    num_pp, num_tp = (1 + max(rank[axis] for rank in states) for axis in (0, 1))
    missing = [(pp, tp) for pp in range(num_pp) for tp in range(num_tp) if (pp, tp) not in states]
    if missing:
        pp, tp = missing[0]
        raise UserError(f"{folder} lacks mp_rank_{tp:02d}{f'_{pp:03d}' if num_pp > 1 else ''}")
    return states


def _read_state(folder: Path) -> State:
    for name in _FILES:
        file = folder / name
        if file.suffix == ".safetensors" and file.exists():
            return {"model": SafetensorsFile(file), "checkpoint_version": 3.0}
        if file.exists():
            state = read_pickled(file, allow_inert=True)
            if not isinstance(state, Mapping) or not ({"model", "model0"} & state.keys()):
                raise UserError(f"{file} holds no model")
            return state
    raise UserError(f"{folder} has none of {', '.join(_FILES)}")


def _chunks(states: Mapping[tuple[int, int], State]) -> Iterator[ModelChunk]:
    """Yield the model's parts in the order of its layers: chunk by chunk if the pipeline is interleaved."""
    keys = [key for key in states[0, 0] if re.fullmatch(r"model\d*", key)]
    for key in sorted(keys, key=lambda key: int(key[5:] or 0)):
        for pp in sorted({pp for pp, _ in states}):
            parts = [states[pp, tp].get(key, {}) for tp in sorted({tp for _, tp in states})]
            yield [dict(flattened(part)) for part in parts]


_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.(pt|safetensors)")
_STATES = "mp_rank_00_model_states.pt"
_STEP = "global_step"


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder looks like Megatron-DeepSpeed's, for all iterations or for one."""
    return any(folder.glob("layer_*-model_*-model_states.*")) or any(folder.glob(f"{_STEP}*"))


def open_deepspeed(folder: Path, iteration: int | None, settings: Settings) -> MegatronSource:
    """Open all of a checkpoint's layer files. Their tensors are memory-mapped, not read.

    Raises:
        UserError: there is no such checkpoint, one of its files cannot be read, or megalite does not have the
            model.
    """
    folder = _step_folder(folder, iteration)
    layers = _read_layers(folder)
    arguments, why_unread, saved_iteration = None, "", 0
    try:
        arguments, saved_iteration = _read_arguments(folder)
    except UserError as error:
        why_unread = str(error)
    return MegatronSource(
        settings,
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
                if is_layer:
                    ours = f"layers.{num_layers}.{name}"
                else:  # the last norm is a pipeline layer of its own: its tensors are just weight and bias
                    ours = f"final_layernorm.{name}" if name in ("weight", "bias") else name
                part[ours] = tensors[name]
        num_layers += is_layer
    return parts


def _read_arguments(folder: Path) -> tuple[Mapping[str, Any] | None, int]:
    if not (folder / _STATES).exists():
        return None, 0
    state = read_pickled(folder / _STATES, allow_inert=True)
    if not isinstance(state, Mapping):
        return None, 0
    arguments = state.get("args")
    return None if arguments is None else vars(arguments), int(state.get("iteration", 0))
