"""Parameters and gradients as views of flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.parallel.shard import ParameterSpec, spec_of


@dataclass(frozen=True)
class Slot:
    """A parameter's place, elements [start, end), in its group's flat tensors."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)


class FlatGroup:
    """Parameters that share a weight decay, their weights in one flat tensor and their gradients in another.

    The last parameters of the model come first: backward fills the flat gradient from its start, so that
    whole stretches of it are ready for reduction early. Every parameter and every ``.grad`` becomes a view,
    and autograd adds to the views in place.

    Attributes:
        weight: flat weights, ``[n]``.
        grad: flat gradient, ``[n]``.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        first = named_parameters[0][1]
        num_elements = sum(parameter.numel() for _, parameter in named_parameters)
        self.weight = torch.empty(num_elements, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros_like(self.weight)
        self.slots: list[Slot] = []
        start = 0
        for name, parameter in reversed(named_parameters):
            slot = Slot(name, parameter, start, start + parameter.numel())
            self._adopt(slot)
            self.slots.append(slot)
            start = slot.end

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """The part of a flat tensor of this group that belongs to one parameter, in the parameter's shape."""
        return flat[slot.start : slot.end].view(slot.parameter.shape)

    @torch.no_grad()
    def _adopt(self, slot: Slot) -> None:
        weight = self.view(self.weight, slot)
        weight.copy_(slot.parameter)
        slot.parameter.data = weight
        slot.parameter.grad = self.view(self.grad, slot)
