"""Read Megatron-LM's checkpoints: SAVE/iter_0000100/mp_rank_00_001/model_optim_rng.pt and the like.

There is a file for each tensor-parallel (00) and pipeline rank (001). It holds a dict with ``model``, or with
``model0``, ``model1``, ... if the pipeline is interleaved.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.convert.foreign_files import SafetensorsFile, read_name, read_pickled
from megalite.checkpoint.convert.megatron_model import MegatronCheckpoint
from megalite.checkpoint.convert.megatron_tensors import flattened, our_name
from megalite.errors import UserError

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


def find_in_megatron(folder: Path, iteration: int | None) -> MegatronCheckpoint:
    """Open all of a checkpoint's files. Their tensors are memory-mapped, not read.

    Raises:
        UserError: there is no such checkpoint, or one of its files is missing or cannot be read.
    """
    folder = _iteration_folder(folder, iteration)
    if _is_new(folder):
        raise UserError(
            f"{folder} has Megatron's distributed format, whose index is a pickle: save it with "
            "--ckpt-format torch (Megatron's --ckpt-convert-format torch rewrites one) and convert that"
        )
    states = _read_states(folder)
    first = states[0, 0]
    arguments = first.get("args")
    return MegatronCheckpoint(
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
    """Return the folder of the requested iteration, or of the last iteration."""
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


def _is_new(folder: Path) -> bool:
    """Return whether an iteration has the distributed format, which torch.distributed.checkpoint writes."""
    return _has_new_files(folder) or (folder / ".metadata").is_file() or any(folder.glob("*.distcp"))


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
