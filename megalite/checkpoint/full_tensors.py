"""Read full tensors from a checkpoint in one process, without a layout: for tools."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from megalite.checkpoint.manifest import CONFIG, DamagedCheckpoint, Manifest, TensorRecord, dtype_of
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.tensor_files import ReadTarget, open_tensors, read_targets
from megalite.utils.errors import UserError, few

OF_TRAINING = ".router.expert_loads", ".amax_history"
"""End of the names of buffers that only training reads."""


def check_weights(manifest: Manifest, parameters: Collection[str], num_layers: int) -> None:
    """Check that a checkpoint holds no weights that the model of its config.yaml does not have.

    Args:
        parameters: names of all parameters of the model.

    Raises:
        DamagedCheckpoint: it holds such weights.
    """
    saved = (name.removeprefix("model.") for name in manifest.tensors if name.startswith("model."))
    weights = (name for name in saved if not name.endswith(OF_TRAINING))
    if others := sorted(name for name in weights if name not in parameters):
        problem = (
            f"the model of {CONFIG}, num_layers {num_layers}, has no {few(others)}; only the program of a "
            "model of its own can load it"
        )
        raise DamagedCheckpoint(manifest.folder, [problem])


def check_averages(manifest: Manifest) -> None:
    """Check that a checkpoint holds an average of the weights.

    Raises:
        UserError: it holds none.
    """
    if not any(name.startswith("ema.") for name in manifest.tensors):
        raise UserError(
            f"--ema: {manifest.folder} holds no average of the weights, because its run had no --ema-decay: "
            "remove --ema"
        )


class FullReader:
    """Reader of full tensors, one at a time, with only one in memory.

    It does not verify the files; use `manifest.damage_of`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(sorted(self.manifest.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor, without padding.

        Raises:
            KeyError: there is no such tensor.
            DamagedCheckpoint: its file cannot be read.
        """
        first = self._first(name)
        if first.range is not None:
            return first.range.full_shape
        try:
            with open_tensors(self.manifest, first.file) as handle:
                return tuple(handle.get_slice(name).get_shape())
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is saved.

        Raises:
            KeyError: there is no such tensor.
        """
        return dtype_of(self._first(name).dtype)

    def pieces(self, name: str) -> list[TensorRecord]:
        """Return the pieces that make up the full tensor, with each element in exactly one piece.

        Raises:
            KeyError: there is no such tensor.
            DamagedCheckpoint: elements are in no piece or in several.
        """
        target = ReadTarget(name, torch.empty(0, dtype=self.dtype(name)), self._full_range(name))
        try:
            return target.pieces(self.manifest.tensors[name])
        except ValueError as error:
            raise self._damaged(error) from None

    def tensor(self, name: str) -> Tensor:
        """Return the full tensor, contiguous and in its own memory.

        Raises:
            KeyError: there is no such tensor.
            DamagedCheckpoint: a file cannot be read or differs from the index.
        """
        full, dtype = self._full_range(name), self.dtype(name)
        numel = math.prod(full.shape)
        files = {piece.file for piece in self.pieces(name)}
        try:
            if numel * dtype.itemsize > sum((self.manifest.folder / file).stat().st_size for file in files):
                raise ValueError(f"{name} is larger than its files")  # before any memory is allocated
            elements = torch.empty(numel, dtype=dtype)
            read_targets(self.manifest, [ReadTarget(name, elements, full)])
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return elements.view(full.shape)

    def _first(self, name: str) -> TensorRecord:
        return self.manifest.tensors[name][0]

    def _full_range(self, name: str) -> ParameterRange:
        return ParameterRange.whole(self.shape(name))

    def _damaged(self, error: Exception) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.manifest.folder, [str(error)])
