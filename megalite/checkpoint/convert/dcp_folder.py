"""Read safetensors shards of torch.distributed.checkpoint (DCP), and refuse its folders with a pickled index.

torchtitan and FSDP save with DCP. Its usual format has an index in `.metadata`, which is a pickle. Its
HuggingFaceStorageWriter writes `shard-00001-model-00001-of-00001.safetensors` and so on instead: each rank's
parts of the tensors, with their offsets in the file's metadata.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.convert.foreign_files import SafetensorsFile
from megalite.errors import UserError, few
from megalite.files import parse_json

SHARDS = "shard-*-model-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"
"""Key of a file's metadata: a JSON object with the offsets of each tensor."""


def check_index(folder: Path) -> None:
    """Refuse a folder with a pickled index of DCP, or with such folders for each step.

    Raises:
        UserError: it is such a folder.
    """
    steps = [folder, *sorted(folder.glob("step-*"))]  # torchtitan's
    if any((step / ".metadata").is_file() or any(step.glob("*.distcp")) for step in steps):
        raise UserError(
            f"--load {folder} has the format of torch.distributed.checkpoint (torchtitan, FSDP), whose index "
            "is a pickle: convert it with torchtitan's scripts/checkpoint_conversion/convert_to_hf.py, or "
            "save it with torch's HuggingFaceStorageWriter, and convert that"
        )


class _Piece(NamedTuple):
    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def overlaps(self, other: _Piece) -> bool:
        return all(
            start < other_start + other_size and other_start < start + size
            for start, size, other_start, other_size in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        )


class ShardedTensors(Mapping[str, Tensor]):
    """Maps names to the tensors of a folder's shards. A tensor is put together when it is read.

    Raises:
        UserError: a file cannot be read, or the pieces of a tensor do not make it up.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {file.name: SafetensorsFile(file) for file in sorted(folder.glob(SHARDS))}
        self._pieces: dict[str, list[_Piece]] = {}
        for name, file in self._files.items():
            offsets = _offsets_in(folder / name, file)
            for tensor in file:
                piece = _Piece(name, offsets[tensor], file.shape(tensor))
                if 0 not in piece.shape:  # the part of a rank behind the end of a short tensor
                    self._pieces.setdefault(tensor, []).append(piece)
        if broken := [name for name, pieces in self._pieces.items() if not _is_whole(pieces)]:
            raise UserError(
                f"{folder} does not hold all parts of {few(broken)}, each once: is a shard missing?"
            )

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        parts = [(piece, self._files[piece.file][name]) for piece in pieces]
        if len(parts) == 1:
            return parts[0][1]
        full = torch.empty(_full_shape(pieces), dtype=parts[0][1].dtype)
        for piece, part in parts:
            ranges = zip(piece.offsets, piece.shape, strict=True)
            full[tuple(slice(start, start + size) for start, size in ranges)] = part
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _offsets_in(path: Path, file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each tensor of a file."""
    try:
        record = parse_json(file.metadata[_OFFSETS])
        found = {name: tuple(record[name]["saved_offsets"]) for name in file}
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged: it has no {_OFFSETS} for its tensors") from None
    for name, offsets in found.items():
        is_valid = all(type(each) is int and 0 <= each < 2**63 for each in offsets)
        if not is_valid or len(offsets) != len(file.shape(name)):
            raise UserError(f"{path} is damaged: {name} has the offsets {list(offsets)!r}")
    return found


def _full_shape(pieces: Sequence[_Piece]) -> tuple[int, ...]:
    ends = ([start + size for start, size in zip(each.offsets, each.shape, strict=True)] for each in pieces)
    return tuple(map(max, zip(*ends, strict=True)))


def _is_whole(pieces: Sequence[_Piece]) -> bool:
    """Return whether the pieces fill their tensor. A missing last piece cannot be seen here."""
    if len({len(piece.shape) for piece in pieces}) > 1:
        return False
    num_elements = sum(math.prod(piece.shape) for piece in pieces)
    has_overlap = any(one.overlaps(other) for one, other in itertools.combinations(pieces, 2))
    return num_elements == math.prod(_full_shape(pieces)) and not has_overlap
