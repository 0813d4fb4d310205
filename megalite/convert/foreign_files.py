"""Tensors in files of other programs: safetensors, and what torch.save wrote, without running a line of it.

A pickle can name any function to be called when it is read. What is read here is read by torch's weights-only
unpickler, which calls nothing but the makers of tensors. Tensors are mapped into memory, not read: a file
larger than memory can be opened.
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

from megalite.errors import UserError
from megalite.folders import read_regular

_MAX_NAME_BYTES = 200
INERT = (
    "megatron.", "deepspeed.", "transformer_engine.", "apex.", "fp16.", "numpy.", "pathlib.", "signal.",
)  # fmt: skip
"""Packages whose objects may stand in a file beside the weights: each becomes a `StandIn`."""


class StandIn:
    """What is put in the place of an object of another program: it remembers its arguments and does nothing.

    Attributes:
        arguments: what the object would have been made with.
    """

    def __new__(cls, *arguments: object) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        """Takes no state."""


class SafetensorsFile(Mapping[str, Tensor]):
    """A safetensors file as a mapping; a tensor is a view of the file."""

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
        """A tensor's shape, from the header alone."""
        return tuple(self._file.get_slice(name).get_shape())


def read_name(file: Path) -> str:
    """Return the one word of a small file that names the newest checkpoint.

    Raises:
        UserError: the file cannot be read, or holds more than a name.
    """
    try:
        return read_regular(file, _MAX_NAME_BYTES, follow=True).decode().strip()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is damaged: it is no text") from None


def open_weights(file: Path) -> Mapping[str, Tensor]:
    """A file that holds tensors by name and nothing else.

    Raises:
        UserError: it cannot be read, wants to run code, or holds something else.
    """
    _check_file(file)
    if file.suffix == ".safetensors":
        return SafetensorsFile(file)
    found = read_pickled(file)
    if not isinstance(found, Mapping):
        raise UserError(f"{file} holds no tensors by name")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def read_pickled(file: Path, allow_inert: bool = False) -> Any:
    """What torch.save wrote to the file: tensors, numbers, text and containers of them.

    Args:
        allow_inert: accept objects of `INERT`, and an argparse.Namespace, which holds what it is given.

    Raises:
        UserError: the file cannot be read, or names something that could be made to run code.
    """
    _check_file(file)
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(2) == b"PK"
        with _nothing_else_safe():
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_zip else []
            strange = [name for name in names if not (allow_inert and _is_inert(name))]
            if strange:
                raise _hostile(file, ", ".join(sorted(strange)[:3]))
            torch.serialization.add_safe_globals([_inert(name) for name in names])
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise _hostile(file, _first_line(error)) from None
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise UserError(f"{file} cannot be read: {_first_line(error)}") from None


def _check_file(file: Path) -> None:
    """Refuse what is no regular file: to open a pipe would wait for its other end."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file} cannot be read: it is not a regular file")


@contextmanager
def _nothing_else_safe() -> Iterator[None]:
    """In the block nothing is safe to be made but what it says itself, whatever other packages have said."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _hostile(file: Path, names: str) -> UserError:
    return UserError(
        f"{file} is refused, as to read it could run code of its author ({names}): where you trust it, "
        "save its tensors alone as safetensors, on the machine that made it, and convert those"
    )


def _is_inert(name: str) -> bool:
    return name == "argparse.Namespace" or name.startswith(INERT)


def _inert(name: str) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    return _stand_in(name), name


@functools.cache
def _stand_in(name: str) -> type[StandIn]:
    """A class for each name, which it has for its own: an enum's member can be told by it."""
    return type(name.rpartition(".")[2], (StandIn,), {})


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
