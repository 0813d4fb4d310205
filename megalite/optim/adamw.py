"""AdamW with unscaling and clipping on the elements that a rank owns, and its state for one bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.distributed.observer import Observer, observed
from megalite.kernels import adamw_
from megalite.optim.flat_buffers import Bucket, BucketEntry, ParameterShard
from megalite.optim.gradient_buckets import main_dtype
from megalite.optim.loss_scaler import LossScaler
from megalite.optim.offload import OffloadedUpdate, OptimizerOffload
from megalite.torch_private import foreach_div_, foreach_mul_

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, by torch's names."""


def kinds_of(weight_dtype: torch.dtype) -> tuple[str, ...]:
    """Return the kinds of tensors in a state: moments, and main weights if they are separate."""
    return MOMENTS if main_dtype(weight_dtype) == weight_dtype else ("main", *MOMENTS)


class OptimizerState(Protocol):
    """Main weights and moments of the elements that this rank updates.

    Attributes:
        decay: whether weight decay applies.
        is_cut: whether the parameters are sharded over tp or replicated on every tp rank.
        is_vocabulary: whether they are weights of the vocabulary (see `ParameterSpec`).
        main: main weights, ``[n]``.
        rounded: the model's weights, to which an update rounds the main weights, ``[n]``; None if they are
            the main weights, or are rounded elsewhere.
        moments: AdamW's moments by torch's names, ``[n]``.
    """

    @property
    def decay(self) -> bool: ...

    @property
    def is_cut(self) -> bool: ...

    @property
    def is_vocabulary(self) -> bool: ...

    @property
    def main(self) -> Tensor: ...

    @property
    def rounded(self) -> Tensor | None: ...

    @property
    def moments(self) -> Mapping[str, Tensor]: ...


class BucketState:
    """Main weights and moments of the elements of one bucket that this rank owns.

    Attributes:
        main: main weights, ``[n]``: a view of the bucket's weights if these have the main dtype; otherwise a
            copy, and the bucket's weights are the rounded main weights.
        moments: AdamW's moments by torch's names, ``[n]``.
    """

    def __init__(self, bucket: Bucket, owned: slice, offloaded: Mapping[str, Tensor] | None = None) -> None:
        """Allocate the tensors.

        Args:
            offloaded: the state's tensors in host memory, by kind (see `kinds_of`); None to allocate them on
                the bucket's device.
        """
        self.bucket = bucket
        self.owned = owned
        weight = bucket.weight[owned]
        dtype = main_dtype(weight.dtype)
        if offloaded is None:
            self.main = weight.to(dtype)
            self.moments = {moment: torch.zeros_like(self.main) for moment in MOMENTS}
        else:
            self.main = offloaded["main"].copy_(weight) if "main" in offloaded else weight
            self.moments = {moment: offloaded[moment] for moment in MOMENTS}

    @property
    def has_own_main(self) -> bool:
        """Return whether the main weights are separate from the model's."""
        return self.main.dtype != self.bucket.weight.dtype

    @property
    def decay(self) -> bool:
        return self.bucket.decay

    @property
    def is_cut(self) -> bool:
        return self.bucket.is_cut

    @property
    def is_vocabulary(self) -> bool:
        return self.bucket.is_vocabulary

    @property
    def rounded(self) -> Tensor | None:
        return self.bucket.weight[self.owned] if self.has_own_main else None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint besides the model's weights, by name."""
        if self.has_own_main:
            yield "main", self.main
        yield from self.moments.items()

    def parameter_shard(self, flat: Tensor, entry: BucketEntry) -> ParameterShard:
        """Return a parameter's part of a tensor of the owned elements, such as one of `tensors`."""
        start = min(max(entry.start, self.owned.start), entry.end)
        end = max(min(entry.end, self.owned.stop), start)
        return ParameterShard(
            flat[start - self.owned.start : end - self.owned.start],
            start - entry.start,
            tuple(entry.parameter.shape),
            entry.spec,
            is_replicated=self.owned.stop - self.owned.start == self.bucket.size,
        )


class _Update(NamedTuple):
    """A state, its gradient and the settings of its update."""

    state: OptimizerState
    gradient: Tensor
    learning_rate: float
    weight_decay: float

    def offloaded(self) -> OffloadedUpdate:
        weight = self.state.main if self.state.rounded is None else self.state.rounded
        return OffloadedUpdate(self.gradient, weight, self.learning_rate, self.weight_decay)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on gradients that are unscaled and clipped first.

    Everything that an update depends on stays on the device, and the device decides whether to update: the
    host reads nothing and never waits. With offloaded states, the host reads the decision, and one of its
    threads updates these states.

    Args:
        offload: holds the first states; None if all states are on the device.
        scaler: loss scaler of the gradients.
        observers: notified of clipping and of the update, by the names of Megatron-LM's timers.

    Attributes:
        num_steps: updates so far, an fp32 scalar.
    """

    def __init__(
        self,
        states: Sequence[OptimizerState],
        config: OptimizerConfig,
        scaler: LossScaler,
        observers: Sequence[Observer[str]],
        device: torch.device,
        offload: OptimizerOffload | None = None,
    ) -> None:
        self.states = states
        self.offload = offload
        self.config = config
        self.scaler = scaler
        self.observers = observers
        self.num_steps = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        grad_norm: Tensor,
        is_allowed: Tensor | None = None,
        decoupled_learning_rate: float | None = None,
    ) -> None:
        """Update main weights, moments and the model's weights from the unscaled and clipped gradients.

        If the norm is not finite or the update is not allowed, all of these and the gradients keep their
        values. Otherwise the gradients may be unscaled and clipped in place.

        Args:
            gradients: one for each of the states.
            grad_norm: global norm of the unscaled gradient, an fp64 scalar on the device.
            is_allowed: a bool scalar on the device; None allows the update.
            decoupled_learning_rate: learning rate of vocabulary weights; None to use `learning_rate`.
        """
        with observed(self.observers, "optimizer-clip-main-grad"):
            is_good = grad_norm.isfinite()
            if is_allowed is not None:
                is_good = is_good.logical_and_(is_allowed)
            divisor = self._divisor(grad_norm)
            num_offloaded = 0 if self.offload is None else self.offload.count
            updates_host = self.offload is not None and bool(is_good.item())
            host_divisor = divisor
            if self.offload is not None and updates_host:
                self.offload.copy_gradients(gradients[:num_offloaded])
                if divisor is not None:
                    # On the device for all states, so that their gradients stay comparable.
                    _divide(gradients, divisor)
                    divisor = None
        with observed(self.observers, "optimizer-inner-step"):
            number = self.num_steps + 1
            own_rate = learning_rate if decoupled_learning_rate is None else decoupled_learning_rate
            updates = [
                _Update(
                    state,
                    gradient,
                    own_rate if state.is_vocabulary else learning_rate,
                    weight_decay if state.decay else 0.0,
                )
                for state, gradient in zip(self.states, gradients, strict=True)
            ]
            groups: dict[tuple[float, float], list[_Update]] = {}
            for update in updates[num_offloaded:]:
                groups.setdefault((update.learning_rate, update.weight_decay), []).append(update)
            for (rate, decay), group in groups.items():
                self._update(group, rate, decay, number, divisor, is_good)
            if self.offload is not None and updates_host:
                offloaded = [update.offloaded() for update in updates[:num_offloaded]]
                self.offload.start_update(offloaded, number.item(), host_divisor)
            self.num_steps += is_good

    def _divisor(self, grad_norm: Tensor) -> Tensor | None:
        """Return the divisor that unscales and clips gradients, an fp64 scalar; None if it is always 1."""
        scale = self.scaler.scale
        if self.config.clip_grad > 0.0:
            excess = (grad_norm + 1e-6) / self.config.clip_grad  # torch's and Megatron's formula
            return excess.clamp_min_(1.0).mul_(scale)
        return None if scale == 1.0 else torch.full_like(grad_norm, scale)

    def _update(
        self,
        updates: Sequence[_Update],
        learning_rate: float,
        weight_decay: float,
        number: Tensor,
        divisor: Tensor | None,
        is_good: Tensor,
    ) -> None:
        """Update states with equal rate and decay; the last three arguments are scalars on the device."""
        states = [update.state for update in updates]
        adamw_(
            [state.main for state in states],
            [state.moments["exp_avg"] for state in states],
            [state.moments["exp_avg_sq"] for state in states],
            [state.rounded for state in states if state.rounded is not None],
            [update.gradient for update in updates],
            number=number,
            divisor=divisor,
            is_good=is_good,
            learning_rate=learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            weight_decay=weight_decay,
            epsilon=self.config.adam_eps,
        )


def _divide(gradients: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide gradients in place, to the same bits as `adamw_` does."""
    if not gradients:
        return
    if gradients[0].dtype == torch.float64:
        foreach_mul_(list(gradients), divisor.reciprocal())
    else:
        foreach_div_(list(gradients), divisor.float())
