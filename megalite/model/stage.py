"""The base class of a pipeline stage of a model.

Shapes: s sequence, b microbatch, h hidden size. With sequence parallelism every ``[s, b, h]`` is a rank's
slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.errors import UserError, kind_of
from megalite.kernels import site_key
from megalite.microbatch import Microbatch
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext, replicate_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Stage(nn.Module, ABC):
    """Holds some layers of a model.

    Parameters have their names in the whole model, on any stage: ``layers.7.mlp.up.weight``.

    Args:
        context: settings shared by all modules; its dtype is the config's.
        is_first: whether the stage maps tokens to hidden states.
        is_last: whether the stage computes the loss.

    Attributes:
        layers: layers by their numbers in the whole model.
        layer_groups: indices of the layers that are recomputed together; by default each layer is a group.
    """

    layers: nn.ModuleDict
    layer_groups: Sequence[range] | None = None

    def __init__(
        self, config: ModelConfig, context: LayerContext, *, is_first: bool = True, is_last: bool = True
    ) -> None:
        super().__init__()
        assert context.dtype == DTYPES[config.params_dtype], (context.dtype, config.params_dtype)
        self.config = config
        self.context = context
        self.is_first = is_first
        self.is_last = is_last

    @abstractmethod
    def forward(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Run one microbatch through this stage.

        Args:
            hidden: ``[s, b, h]`` from the previous stage; None on the first stage.

        Returns:
            ``[s, b, h]`` for the next stage; on the last stage the sum of each loss over the microbatch, a
            scalar or a vector of several losses.
        """

    @abstractmethod
    def units(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield the modules in forward's order, each with the parameters used until the next one's call."""

    @property
    def description(self) -> str | None:
        """Return a line about the stage's kernels for the start of the log."""
        return None

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return a weight that the first and last stage share; None on other stages."""
        return None

    def shared_modules(self) -> dict[str, nn.Module]:
        """Return modules of a first stage that a last stage on the same rank gets as arguments."""
        return {}

    def build(self, name: str, function: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that `function` builds, with initial weights that are the same in every layout.

        Parameters of torch's own modules are replicated over tp and keep the values from torch's generator,
        which is seeded here by `name`.

        Raises:
            UserError: the function does not return a module.
        """
        device = "meta" if self.context.device.type == "meta" else "cpu"
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(site_key(self.context.seed, name))
            module = function()
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{type(self).__name__} builds {name} as {kind_of(module)}: return an instance of "
                "torch.nn.Module"
            )
        replicate_parameters(module, self.context)
        return module

    def run_layers(self, layers: Sequence[nn.Module], x: Tensor, *inputs: Any) -> Tensor:
        """Run the layers one after the other, ``[s, b, h]`` to ``[s, b, h]``.

        Args:
            inputs: arguments of each layer besides x.
        """
        for group in self.groups_of(len(layers)):
            x = self.run_group(group, layers, x, *inputs)
        return x

    def groups_of(self, num_layers: int) -> Sequence[range]:
        """Return the indices of the layers that run together, group by group."""
        return self.layer_groups or [range(i, i + 1) for i in range(num_layers)]

    def run_group(self, group: range, layers: Sequence[nn.Module], x: Tensor, *inputs: Any) -> Tensor:
        """Run the layers of one group; see `run_layers`.

        Args:
            group: indices into `layers`.
        """
        for i in group:
            x = layers[i](x, *inputs)
        return x

    def tables(self) -> Iterable[Tensor]:
        """Return the tensors of the stage that layers compute with, besides parameters."""
        return self.buffers()

    def initialize(self) -> None:
        """Fill all parameters with their initial values; call it once all modules are built."""
        if self.context.has_weights and self.context.device.type != "meta":
            initialize(self, self.context.seed, self.context.topology)

    def masked_sum(self, losses: Tensor, microbatch: Microbatch) -> Tensor:
        """Sum the losses ``[s, b]`` of the tokens that `loss_mask` selects; return a scalar.

        Raises:
            UserError: the losses have another shape.
        """
        if losses.shape != (microbatch.labels.shape[1], microbatch.labels.shape[0]):
            raise UserError(
                f"masked_sum got losses of shape {list(losses.shape)}, and the microbatch has "
                f"{list(microbatch.labels.t().shape)} labels [s, b]: pass the loss of each token"
            )
        if microbatch.loss_mask is not None:
            losses = losses.where(microbatch.loss_mask.t(), 0.0)
        return losses.sum()


StageProvider = Callable[..., Stage]
"""Builds a pipeline stage: a subclass of `Stage`, or a function with these arguments.

config, context: see `Stage`.
layers: numbers of the stage's layers in the whole model.
is_first, is_last: by keyword; see `Stage`.
Others by keyword: the first stage's `shared_modules`, if this rank holds both the first and last stage.
"""
