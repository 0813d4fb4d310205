"""Read tensors from other programs' files (safetensors, torch.save, DCP) without running their code.

A pickle can call any function when it is read. We read it with torch's weights-only unpickler, which only
calls the constructors of tensors. Tensors are memory-mapped, so a file may be larger than memory.

torchtitan and FSDP save with torch.distributed.checkpoint (DCP). Its usual format has an index in
`.metadata`, which is a pickle: such folders are refused. Its HuggingFaceStorageWriter writes
`shard-00001-model-00001-of-00001.safetensors` and so on instead: each rank's parts of the tensors, with
their offsets in the file's metadata.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from megalite.tensor_parallel.placement import Box
from megalite.utils.errors import UserError, few, first_line
from megalite.utils.files import parse_json, read_regular

_MAX_NAME_BYTES = 200
_MAX_LINE = 200
INERT = (
    "megatron.", "deepspeed.", "transformer_engine.", "apex.", "fp16.", "numpy.", "pathlib.", "signal.",
)  # fmt: skip
"""Packages whose objects may be in a file beside the weights. Each object becomes a `StandIn`."""


class StandIn:
    """Substitute for an object of another program. It keeps the object's arguments and does nothing.

    Attributes:
        arguments: arguments that the object would have been constructed with.
    """

    def __new__(cls, *arguments: object) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


class SafetensorsFile(Mapping[str, Tensor]):
    """Memory-mapped safetensors file; tensors are views of the file."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = safetensors.safe_open(file, framework="pt", device="cpu")
            self._names = tuple(self._file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
        self.metadata: Mapping[str, str] = self._file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, reading only the header."""
        return tuple(self._file.get_slice(name).get_shape())


def read_name(file: Path) -> str:
    """Return the name of the newest checkpoint from a small file that holds it.

    Raises:
        UserError: the file cannot be read, or holds more than a name.
    """
    try:
        return read_regular(file, _MAX_NAME_BYTES, follow=True).decode().strip()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is damaged: it is not text") from None


def open_weights(file: Path) -> Mapping[str, Tensor]:
    """Open a file that holds tensors by name.

    Raises:
        UserError: the file cannot be read, would run code, or holds something else.
    """
    _check_file(file)
    if file.suffix == ".safetensors":
        return SafetensorsFile(file)
    found = read_pickled(file)
    if not isinstance(found, Mapping):
        raise UserError(f"{file} does not hold tensors by name")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def read_pickled(file: Path, allow_inert: bool = False) -> Any:
    """Load a file that torch.save wrote: tensors, numbers, text and containers of them.

    Args:
        allow_inert: accept objects of packages in `INERT`, and an argparse.Namespace, which only holds
            values.

    Raises:
        UserError: the file cannot be read, or names something that could run code.
    """
    _check_file(file)
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(2) == b"PK"
        with _no_safe_globals():
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_zip else []
            strange = [name for name in names if not (allow_inert and _is_inert(name))]
            if strange:
                raise _hostile(file, ", ".join(sorted(strange)[:3]))
            torch.serialization.add_safe_globals([_inert(name) for name in names])
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise _hostile(file, first_line(error)[:_MAX_LINE]) from None
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise UserError(f"{file} cannot be read: {first_line(error)[:_MAX_LINE]}") from None


def _check_file(file: Path) -> None:
    """Refuse a file that is not regular, since opening a pipe would wait for its other end."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file} cannot be read: it is not a regular file")


@contextmanager
def _no_safe_globals() -> Iterator[None]:
    """Ignore, within the block, the classes that other packages have declared safe to construct."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _hostile(file: Path, names: str) -> UserError:
    return UserError(
        f"{file} is refused, because reading it could run code of its author ({names}): if you trust it, "
        "save only its tensors as safetensors, on the machine that made it, and convert those"
    )


def _is_inert(name: str) -> bool:
    return name == "argparse.Namespace" or name.startswith(INERT)


def _inert(name: str) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    return _stand_in(name), name


@functools.cache
def _stand_in(name: str) -> type[StandIn]:
    """Return a class for each name, so that an enum's members can be recognised."""
    return type(name.rpartition(".")[2], (StandIn,), {})


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


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors of a folder's shards. A tensor is put together when it is read.

    Raises:
        UserError: a file cannot be read, or the pieces of a tensor do not make it up.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {file.name: SafetensorsFile(file) for file in sorted(folder.glob(SHARDS))}
        self._pieces: dict[str, list[tuple[str, Box]]] = {}  # by tensor, of each piece the file and box
        for name, file in self._files.items():
            offsets = _offsets_in(folder / name, file)
            for tensor in file:
                box = Box(offsets[tensor], file.shape(tensor))
                if box.numel:  # otherwise the part of a rank behind the end of a short tensor
                    self._pieces.setdefault(tensor, []).append((name, box))
        if broken := [name for name in self._pieces if not _is_whole(self._boxes(name))]:
            raise UserError(
                f"{folder} does not hold all parts of {few(broken)}, each once: is a shard missing?"
            )

    def __getitem__(self, name: str) -> Tensor:
        parts = [(box, self._files[file][name]) for file, box in self._pieces[name]]
        if len(parts) == 1:
            return parts[0][1]
        full = torch.empty(_full_shape(self._boxes(name)), dtype=parts[0][1].dtype)
        for box, part in parts:
            box.of(full).copy_(part)
        return full

    def _boxes(self, name: str) -> list[Box]:
        return [box for _, box in self._pieces[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _offsets_in(path: Path, file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
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


def _full_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    return tuple(map(max, zip(*(box.ends for box in boxes), strict=True)))


def _is_whole(boxes: Sequence[Box]) -> bool:
    """Return whether the boxes fill their tensor. A missing last box cannot be seen here."""
    if len({len(box.shape) for box in boxes}) > 1:
        return False
    has_overlap = any(one.common(other).numel for one, other in itertools.combinations(boxes, 2))
    return sum(box.numel for box in boxes) == math.prod(_full_shape(boxes)) and not has_overlap
