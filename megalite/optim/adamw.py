"""AdamW's state and update on the elements that a rank owns of each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.optim.flat import Bucket, Slot
from megalite.optim.gradients import main_dtype
from megalite.optim.part import Part


class Owned(Protocol):
    """Elements that this rank updates.

    Attributes:
        decay: whether weight decay applies.
        main: weights in the precision that updates need.
        moments: by torch's names, alike.
    """

    @property
    def decay(self) -> bool: ...

    @property
    def main(self) -> Tensor: ...

    @property
    def moments(self) -> Mapping[str, Tensor]: ...

    def publish(self) -> None:
        """Gives the updated main weights to the model."""


class BucketState:
    """Main weights and moments of the elements that this rank owns of one bucket.

    Attributes:
        main: weights in the precision that updates need, ``[n]``: a view of the bucket's own where they have
            it, else apart from them, and the bucket's are the main weights rounded.
        moments: by torch's names, ``[n]``.
    """

    def __init__(self, bucket: Bucket, owned: slice) -> None:
        self.bucket = bucket
        self.owned = owned
        self.main = bucket.weight[owned].to(main_dtype(bucket.weight.dtype))
        self.moments = {moment: torch.zeros_like(self.main) for moment in ("exp_avg", "exp_avg_sq")}

    @property
    def shard(self) -> Tensor:
        """The main weights of this rank's shard: the ranks' shards make up the bucket."""
        return self.main if self.owned == self.bucket.shard else self.main[self.bucket.shard]

    @property
    def has_own_main(self) -> bool:
        """Whether the main weights are apart from the model's."""
        return self.main.dtype != self.bucket.weight.dtype

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        return self.bucket.decay

    def publish(self) -> None:
        """Gives the updated main weights to the model, rounded where they are apart from its own."""
        if self.has_own_main:
            self.bucket.weight[self.owned].copy_(self.main)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds of this state besides the model's weights, by name."""
        if self.has_own_main:
            yield "main", self.main
        yield from self.moments.items()

    def of_parameter(self, flat: Tensor, slot: Slot) -> Part:
        """What one of `tensors` has of a parameter: all of it, or the part that this rank owns."""
        start = min(max(slot.start, self.owned.start), slot.end)
        end = max(min(slot.end, self.owned.stop), start)
        return Part(
            flat[start - self.owned.start : end - self.owned.start],
            start - slot.start,
            tuple(slot.parameter.shape),
            slot.spec,
            is_copied=self.owned.stop - self.owned.start == self.bucket.size,
        )


class AdamW:
    """torch's fused AdamW (Loshchilov and Hutter 2019), by the op itself.

    The class `torch.optim.AdamW` imports torch's compiler when one is made: a second and more of each rank's
    start, for a compiler that is not used. And it counts a step for each tensor, where one count is enough.

    Attributes:
        num_steps: updates so far, an fp32 scalar.
    """

    def __init__(self, states: Sequence[Owned], config: OptimizerConfig, device: torch.device) -> None:
        self.states = states
        self.config = config
        self.num_steps = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
        is_good: Tensor,
    ) -> None:
        """Updates the main weights, and with them the owned elements of the model's.

        Args:
            gradients: of the owned elements, for each of the states; they are left divided.
            divisor: what they are divided by on their way, a scalar on the device; None divides by nothing.
            is_good: a bool scalar on the device; where it is false, all is left as it was.
        """
        pairs = list(zip(self.states, gradients, strict=True))
        signals = _Signals(
            self.num_steps + 1,
            None if divisor is None else divisor.float(),
            is_good.logical_not().float(),
        )
        for decay in (True, False):
            members = [pair for pair in pairs if pair[0].decay is decay]
            self._update(members, learning_rate, weight_decay if decay else 0.0, signals)
        self.num_steps += is_good
        for state in self.states:
            state.publish()

    def _update(
        self,
        pairs: Sequence[tuple[Owned, Tensor]],
        learning_rate: float,
        weight_decay: float,
        signals: _Signals,
    ) -> None:
        if not pairs:  # a stage without layers has none
            return
        states = [state for state, _ in pairs]
        torch._fused_adamw_(
            [state.main for state in states],
            [gradient for _, gradient in pairs],
            [state.moments["exp_avg"] for state in states],
            [state.moments["exp_avg_sq"] for state in states],
            [],
            [signals.number] * len(states),
            lr=learning_rate,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=signals.divisor,
            found_inf=signals.is_bad,
        )


class _Signals(NamedTuple):
    """Scalars on the device that the update reads there, in fp32 as it takes them.

    Attributes:
        number: of this update, from 1.
        divisor: of the gradients; None divides by nothing.
        is_bad: 1 leaves all as it was, 0 does not.
    """

    number: Tensor
    divisor: Tensor | None
    is_bad: Tensor
