"""Read tensors from other programs' files (safetensors, torch.save) without running their code.

A pickle can call any function when it is read. We read it with torch's weights-only unpickler, which only
calls the constructors of tensors. Tensors are memory-mapped, so a file may be larger than memory.
"""

from __future__ import annotations

import argparse
import functools
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from megalite.errors import UserError, first_line
from megalite.files import read_regular

_MAX_NAME_BYTES = 200
_MAX_LINE = 200
INERT = (
    "megatron.", "deepspeed.", "transformer_engine.", "apex.", "fp16.", "numpy.", "pathlib.", "signal.",
)  # fmt: skip
"""Packages whose objects may be in a file beside the weights. Each object becomes a `StandIn`."""


class StandIn:
    """Replaces an object of another program. It keeps the object's arguments and does nothing.

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
    """Reads a memory-mapped safetensors file as a mapping; tensors are views of the file."""

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
