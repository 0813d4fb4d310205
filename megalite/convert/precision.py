"""Types of weights: torch's and ours, and what is lost from one to another."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.model import ParamsDtype
from megalite.errors import UserError
from megalite.model.stage import DTYPES


def precision_of(dtype: torch.dtype) -> ParamsDtype:
    """Our name of a type.

    Raises:
        UserError: models here have no such weights.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name  # type: ignore[return-value]  # a key of the table
    raise UserError(f"the weights are {dtype}, and megalite's {', '.join(map(str, DTYPES.values()))}")


def loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers of one type are rounded in the other."""
    return torch.promote_types(source, target) != target


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another type.

    Raises:
        UserError: a number is too large for it.
    """
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if loses(tensor.dtype, dtype) and not torch.equal(converted.isinf(), tensor.isinf()):
        raise UserError(f"{name} has numbers too large for {dtype}: choose another --params-dtype")
    return converted
