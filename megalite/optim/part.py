"""What a rank holds of a tensor that has a parameter's shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalite.parallel.shard import ParameterSpec


@dataclass(frozen=True)
class Part:
    """Elements ``[start, start + n)`` of this rank's flattened slice of a parameter, or of its state.

    Attributes:
        tensor: those elements, ``[n]``; n may be 0.
        start: place of the first of them in the slice.
        shape: of the slice.
        spec: of the parameter.
        is_copied: whether each data-parallel peer holds these elements too; else they hold the others.
    """

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    spec: ParameterSpec
    is_copied: bool
