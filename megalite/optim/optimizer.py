"""AdamW on flat weights: gradients in, clipped step out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.optim.adamw import AdamW
from megalite.optim.flat import FlatGroup, Slot
from megalite.optim.norm import global_norm
from megalite.optim.reducer import GradReducer
from megalite.parallel.shard import spec_of
from megalite.parallel.tied import sum_tied_gradient
from megalite.topology import Topology


class Optimizer:
    """Owns the gradients of one rank from backward's first addition to the update.

    Args:
        tied_weight: a word table that the first and the last stage share, on those two stages.
        bucket_size: elements of a gradient bucket.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        tied_weight: nn.Parameter | None,
        config: OptimizerConfig,
        topology: Topology,
        bucket_size: int,
    ) -> None:
        self.config = config
        self.topology = topology
        self.tied_weight = tied_weight
        parameters = list(named_parameters)
        by_decay = {
            decay: [pair for pair in parameters if spec_of(pair[1]).decay is decay] for decay in (True, False)
        }
        self.adamws = [
            AdamW(FlatGroup(members), config.weight_decay if decay else 0.0, config)
            for decay, members in by_decay.items()
            if members  # a stage without layers has none
        ]
        self.groups = [adamw.group for adamw in self.adamws]
        self.reducer = GradReducer(self.groups, topology.dp, bucket_size)
        self.counted = [slot.parameter for slot in self._slots() if self._counts(slot)]

    def begin(self, num_microbatches: int) -> None:
        """Empties the gradients and gets ready for that many backward passes."""
        for group in self.groups:
            group.grad.zero_()
        self.reducer.begin(num_microbatches)

    def finish_gradients(self) -> float:
        """Completes the gradients over all ranks and returns their global norm."""
        self.reducer.finish()
        sum_tied_gradient(self.tied_weight, self.topology.pp)
        gradients = [parameter.grad for parameter in self.counted if parameter.grad is not None]
        return global_norm(gradients, self.topology).item()

    def step(self, learning_rate: float, grad_norm: float) -> bool:
        """Clips the gradients to the config's norm and updates the weights.

        Returns:
            False where the norm is not finite: the weights are left as they were.
        """
        if not math.isfinite(grad_norm):
            return False
        scale = self.config.clip_grad / (grad_norm + 1e-6)  # torch's and Megatron's formula
        if self.config.clip_grad > 0.0 and scale < 1.0:
            for group in self.groups:
                group.grad.mul_(scale)
        for adamw in self.adamws:
            adamw.step(learning_rate)
        return True

    def state(self) -> dict[str, Tensor]:
        """Every moment as ``name.moment`` in its parameter's local shape, and step counts, as views."""
        moments = {
            f"{slot.name}.{moment}": adamw.group.view(flat, slot)
            for adamw in self.adamws
            for slot in adamw.group.slots
            for moment, flat in adamw.moments.items()
        }
        return moments | {f"step.{i}": adamw.num_steps for i, adamw in enumerate(self.adamws)}

    def _slots(self) -> Iterator[Slot]:
        for group in self.groups:
            yield from group.slots

    def _counts(self, slot: Slot) -> bool:
        """Whether this rank counts a parameter in the norm: copies on several ranks are counted once."""
        if slot.parameter is self.tied_weight and not self.topology.pp.is_first:
            return False
        return slot.spec.shard is not None or self.topology.tp.is_first
