"""Record what a program's modules return, with the gradients, in the order of execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.observe.recorder import Reader, tensors_in, watch_modules
from megalite.utils.torch_private import schema_of


class Observation(NamedTuple):
    """Tensor that a module has returned, or its gradient.

    Attributes:
        name: the module's name, and the number of the tensor if it returns several.
        call: number of the module's calls before.
        collective: the last collective of this rank before it, or "no collective".
    """

    name: str
    call: int
    is_gradient: bool
    value: Tensor
    collective: str


class Tracer(Reader):
    """Recorder of the outputs of modules in its block.

    Attributes:
        observations: in the order in which they were computed.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.observations: list[Observation] = []
        self._modules = modules
        self._calls: Counter[str] = Counter()
        self._collective = "no collective"
        self._is_ended = False

    def __enter__(self) -> Tracer:
        super().__enter__()
        self._hooks = watch_modules(self, self._modules.items())
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def end(self) -> None:
        """Record no more."""
        self._is_ended = True

    def reads(self, func: Any) -> bool:
        return func.namespace in ("c10d", "_c10d_functional")

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = schema_of(func).name.partition("::")[2].rstrip("_")
        if name == "wait_tensor":
            return
        shapes = [list(tensor.shape) for tensor in tensors_in(args)]
        self._collective = f"{name} of {shapes[0] if shapes else 'nothing'}{_ranks_among(args)}"

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        call = self._calls[name]
        self._calls[name] += 1
        tensors = [each for each in tensors_in(output) if each.is_floating_point() and each.dim() > 0]
        for number, tensor in enumerate(tensors):
            label = name if number == 0 else f"{name}, output {number + 1}"
            self._add(label, call, tensor, is_gradient=False)
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient, label=label: self._add(label, call, gradient, is_gradient=True)
                )

    def _add(self, name: str, call: int, tensor: Tensor, *, is_gradient: bool) -> None:
        if self._is_ended:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        value = local.detach().clone()
        self.observations.append(Observation(name, call, is_gradient, value, self._collective))


def _ranks_among(args: Sequence[Any]) -> str:
    """Return the ranks of the group among an operator's arguments, as a text."""
    for each in args:
        try:
            return f" over ranks {dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))}"
        except (RuntimeError, TypeError, AttributeError, KeyError):
            continue
    return ""
