"""Full tensors out of a checkpoint in one process, without a layout: for tools."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from megalite.checkpoint.manifest import CONFIG, DamagedCheckpoint, Manifest, TensorRecord, dtype_of
from megalite.checkpoint.place import Place
from megalite.checkpoint.tensor_reader import Target, open_tensors, read_targets


def check_weights(manifest: Manifest, parameters: Collection[str], num_layers: int) -> None:
    """Refuse a checkpoint that holds weights for which the model of its config.yaml has no place.

    Args:
        parameters: names of all of the model's.

    Raises:
        DamagedCheckpoint: it does.
    """
    weights = (name.removeprefix("model.") for name in manifest.tensors if name.startswith("model."))
    if others := sorted(name for name in weights if name not in parameters):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        problem = f"the model of {CONFIG}, num_layers {num_layers}, has no {', '.join(others[:3])}{more}"
        raise DamagedCheckpoint(manifest.folder, [problem])


class FullReader:
    """Reads one tensor at a time; no more than that one is in memory.

    What it reads is taken as it is: `manifest.damage_of` tells whether files are as they were saved.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def names(self) -> tuple[str, ...]:
        """Of all tensors, sorted."""
        return tuple(sorted(self.manifest.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the full tensor, without the padding of any layout.

        Raises:
            KeyError: there is no such tensor.
            DamagedCheckpoint: the file that tells it cannot be read.
        """
        first = self._first(name)
        return self._shape_in_file(name, first) if first.place is None else first.place.full_shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor as it is saved.

        Raises:
            KeyError: there is no such tensor.
        """
        return dtype_of(self._first(name).dtype)

    def pieces(self, name: str) -> list[TensorRecord]:
        """Those that make up the full tensor, each element in one of them.

        Raises:
            KeyError: there is no such tensor.
            DamagedCheckpoint: elements are in none of them or in several.
        """
        target = Target(name, torch.empty(0, dtype=self.dtype(name)), self._place(name))
        try:
            return target.pieces(self.manifest.tensors[name])
        except ValueError as error:
            raise self._damaged(error) from None

    def tensor(self, name: str) -> Tensor:
        """The full tensor, contiguous and in memory of its own.

        Raises:
            KeyError: there is no such tensor.
            DamagedCheckpoint: a file cannot be read or has not what the index tells.
        """
        place, dtype = self._place(name), self.dtype(name)
        numel = math.prod(place.shape)
        files = {piece.file for piece in self.pieces(name)}
        try:
            if numel * dtype.itemsize > sum((self.manifest.folder / file).stat().st_size for file in files):
                raise ValueError(f"{name} is larger than its files")  # before any memory is taken
            elements = torch.empty(numel, dtype=dtype)
            read_targets(self.manifest, [Target(name, elements, place)])
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return elements.view(place.shape)

    def _first(self, name: str) -> TensorRecord:
        return self.manifest.tensors[name][0]

    def _place(self, name: str) -> Place:
        """All of the tensor, cut as its pieces are."""
        first, shape = self._first(name).place, self.shape(name)
        return Place(shape, first.dim if first else 0, 0, shape, 0, math.prod(shape))

    def _shape_in_file(self, name: str, record: TensorRecord) -> tuple[int, ...]:
        try:
            with open_tensors(self.manifest, record.file) as handle:
                return tuple(handle.get_slice(name).get_shape())
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.manifest.folder, [str(error)])
