"""AdamW with unscaling and clipping on the elements that a rank owns, and its state for one bucket.

Moments in 16 or 8 bits are widened by an update range by range, and rounded at random (`RoundedMoments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.distributed.axis import Observer, observed
from megalite.distributed.topology import Topology
from megalite.kernels import adamw_, round_moments_, site_key, wide_exp_avg
from megalite.optim import RANGE_SIZE
from megalite.optim.flat_buffers import Bucket, BucketEntry, Section, overlap
from megalite.optim.gradient_buckets import main_dtype
from megalite.optim.gradient_scale import LossScaler
from megalite.optim.offload import OffloadedUpdate, OptimizerOffload
from megalite.tensor_parallel.counter_random import EvenRuns, even_runs
from megalite.tensor_parallel.fp8 import E4M3
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.utils.torch_private import foreach_div_, foreach_mul_

EXP_AVG, EXP_AVG_SQ = MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, by torch's names."""

MOMENTUM = "momentum_buffer"
"""Momentum of matrices that are updated as a whole, by torch's name."""


def offloadable_kinds(*, has_own_main: bool, has_ema: bool) -> tuple[str, ...]:
    """Return the kinds of tensors in a state of AdamW that can be offloaded."""
    return (*(("main",) if has_own_main else ()), *MOMENTS, *(("ema",) if has_ema else ()))


class BucketState:
    """Main weights, moments and averages of the elements of a bucket's section that this rank owns.

    Attributes:
        kind: kind of the section's parameters.
        owned: these elements of the bucket; there may be none.
        is_replicated: whether every data-parallel rank owns the whole bucket.
        main: main weights, ``[n]``: a view of the bucket's weights if these have the main dtype, or of the
            bucket's shard of main weights (ZeRO stage 3); otherwise a copy, and the bucket's weights are the
            rounded main weights.
        moments: AdamW's moments, or a matrix's momentum, by torch's names, ``[n]``.
        rounding: widens and rounds moments in 16 or 8 bits; None if they have the main dtype.
        ema: exponential moving average of the main weights, ``[n]``; None if the run keeps none.
    """

    def __init__(
        self,
        bucket: Bucket,
        section: Section,
        owned: slice,
        offloaded: Mapping[str, Tensor] | None = None,
        *,
        has_ema: bool = False,
        new_rounding: Callable[[Sequence[BucketEntry], slice], RoundedMoments] | None = None,
    ) -> None:
        """Allocate the tensors.

        Args:
            owned: the elements of the bucket that this rank owns.
            offloaded: the state's tensors in host memory, by kind (see `offloadable_kinds`); None to allocate
                them on the bucket's device.
            has_ema: keep an average of the main weights. It starts as the main weights.
            new_rounding: makes the rounding of AdamW's moments, for parameters and the elements that the rank
                owns; None to keep the main dtype.
        """
        self.bucket = bucket
        self.kind = section.kind
        self.is_replicated = owned.stop - owned.start == bucket.size
        self.owned = overlap(slice(section.start, section.end), owned)
        self._section = section
        self.rounding = None if new_rounding is None else new_rounding(self.entries, self.owned)
        dtypes = {} if self.rounding is None else self.rounding.dtypes
        if bucket.main is None:
            weight = bucket.weight[self.owned]
        else:
            weight = bucket.main[self.owned.start - owned.start : self.owned.stop - owned.start]
        if offloaded is None:
            self.main = weight.to(main_dtype(weight.dtype))
            moments = (MOMENTUM,) if self.kind.is_matrix else MOMENTS
            self.moments = {
                moment: torch.zeros_like(self.main, dtype=dtypes.get(moment)) for moment in moments
            }
            self.ema = self.main.clone() if has_ema else None
        else:
            self.main = offloaded["main"].copy_(weight) if "main" in offloaded else weight
            self.moments = {moment: offloaded[moment] for moment in MOMENTS}
            self.ema = offloaded["ema"].copy_(weight) if has_ema else None

    @property
    def entries(self) -> list[BucketEntry]:
        """Return the parameters of the section."""
        start, end = self._section.start, self._section.end
        return [entry for entry in self.bucket.entries if start <= entry.start < end]

    @property
    def has_own_main(self) -> bool:
        """Return whether the main weights are separate from the model's."""
        return self.main.dtype != self.bucket.weight.dtype

    @property
    def rounded(self) -> Tensor | None:
        """Return the model's weights that an update rounds the main weights to, ``[n]``.

        None if they are the main weights, or if they are rounded when they are gathered (ZeRO stage 3).
        """
        return self.bucket.weight[self.owned] if self.has_own_main and self.bucket.main is None else None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint besides the model's weights and their average, by name.

        Moments in fp8 are copies in bf16: call `seal_copies` after writing to them.
        """
        if self.has_own_main:
            yield "main", self.main
        yield from (
            self.moments if self.rounding is None else self.rounding.for_checkpoint(self.moments)
        ).items()

    def seal_copies(self, written: Mapping[str, Tensor | ParameterShard]) -> None:
        """Round the moments that a checkpoint has written to copies, by the names of `Optimizer.state`."""
        if self.rounding is None or not self.rounding.copies_for_checkpoint:
            return
        everything = slice(0, self.main.numel())
        wide = self.wide_moments(everything)
        for entry in self.entries:
            shard = written[f"{entry.name}.{EXP_AVG}"]
            assert isinstance(shard, ParameterShard)
            self.parameter_shard(wide[EXP_AVG], entry).tensor.copy_(shard.tensor)
        self.rounding.store(self.moments, wide, everything, torch.zeros((), device=self.main.device))

    def wide_moments(self, elements: slice) -> dict[str, Tensor]:
        """Return moments of these elements in the main dtype: views, or copies of moments in fewer bits."""
        if self.rounding is None:
            return {name: moment[elements] for name, moment in self.moments.items()}
        return self.rounding.widen(self.moments, elements, self.main.dtype)

    def weights(self) -> Iterator[tuple[str, ParameterShard]]:
        """Yield the model's weights, by parameter: this rank's slices, or rounded shards at ZeRO stage 3."""
        rounded = None if self.bucket.main is None else self.main.to(self.bucket.weight.dtype)
        for entry in self.entries:
            if rounded is None:
                yield entry.name, ParameterShard.whole(entry.parameter.data, entry.spec)
            else:
                yield entry.name, self.parameter_shard(rounded, entry)

    def parameter_shard(self, flat: Tensor, entry: BucketEntry) -> ParameterShard:
        """Return a parameter's part of a tensor of the owned elements, such as one of `tensors`."""
        held = overlap(slice(entry.start, entry.end), self.owned)
        return ParameterShard(
            flat[held.start - self.owned.start : held.stop - self.owned.start],
            held.start - entry.start,
            tuple(entry.parameter.shape),
            entry.spec,
            self.is_replicated,
        )


class _Update(NamedTuple):
    """State, its gradient and the settings of its update."""

    state: BucketState
    gradient: Tensor
    learning_rate: float
    weight_decay: float
    epsilon: float

    def offloaded(self) -> OffloadedUpdate:
        weight = self.state.main if self.state.rounded is None else self.state.rounded
        return OffloadedUpdate(self.gradient, weight, *self.settings)

    @property
    def settings(self) -> tuple[float, float, float]:
        """Return learning rate, weight decay and epsilon."""
        return self.learning_rate, self.weight_decay, self.epsilon


class AdamW:
    """AdamW (Loshchilov and Hutter 2019); gradients are unscaled and clipped first.

    Everything that an update depends on stays on the device, and the device decides whether to update: the
    host reads nothing and never waits. With offloaded states, the host reads the decision, and one of its
    threads updates these states.

    Args:
        offload: holds the first states; None if all states are on the device.
        observers: notified of clipping and of the update, by the names of Megatron-LM's timers.

    Attributes:
        num_steps: updates so far, an fp32 scalar.
    """

    def __init__(
        self,
        states: Sequence[BucketState],
        config: OptimizerConfig,
        scaler: LossScaler,
        observers: Sequence[Observer],
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
        update_others: Callable[[Tensor | None, Tensor], object] | None = None,
    ) -> Tensor:
        """Update main weights, moments and the model's weights from the unscaled and clipped gradients.

        If the norm is not finite or the update is not allowed, all of these and the gradients keep their
        values. Otherwise the gradients may be unscaled and clipped in place.

        Args:
            gradients: one for each of the states.
            grad_norm: global norm of the unscaled gradient, an fp64 scalar on the device.
            is_allowed: a bool scalar on the device; None allows the update.
            decoupled_learning_rate: learning rate of vocabulary weights; None to use `learning_rate`.
            update_others: updates the states of another optimizer. Its arguments are scalars on the device:
                the divisor that unscales and clips gradients, or None for 1, and whether to update.

        Returns:
            Whether all of these are updated, a bool scalar on the device.
        """
        with observed(self.observers, "optimizer-clip-main-grad"):
            is_good = grad_norm.isfinite()
            if is_allowed is not None:
                is_good = is_good.logical_and_(is_allowed)
            divisor = self._divisor(grad_norm)
            number = self.num_steps + 1
            num_offloaded = 0 if self.offload is None else self.offload.count
            updates_host = self.offload is not None and bool(is_good.item())
            on_host: tuple[float, float | None] = 0.0, None
            if self.offload is not None and updates_host:
                # Read them before the device has more work: a read waits for all of it.
                on_host = number.item(), None if divisor is None else divisor.item()
                if self.offload.gradients is not None:
                    self.offload.gradients.copy_missing(gradients[:num_offloaded])
                if divisor is not None:
                    # On the device for all states, so that their gradients stay comparable.
                    _divide(gradients, divisor)
                    divisor = None
        with observed(self.observers, "optimizer-inner-step"):
            own_rate = learning_rate if decoupled_learning_rate is None else decoupled_learning_rate
            updates = self._updates(gradients, learning_rate, own_rate, weight_decay)
            groups: dict[tuple[tuple[float, ...], bool], list[_Update]] = {}
            for update in updates[num_offloaded:]:
                groups.setdefault((update.settings, update.state.bucket.main is None), []).append(update)
            for group in groups.values():
                for pieces in _pieces(group):
                    self._update(pieces, number, divisor, is_good)
            if update_others is not None:
                update_others(divisor, is_good)
            if self.offload is not None and updates_host:
                offloaded = [update.offloaded() for update in updates[:num_offloaded]]
                self.offload.start_update(offloaded, *on_host)
            self.num_steps += is_good
        return is_good

    def _updates(
        self, gradients: Sequence[Tensor], learning_rate: float, vocabulary_rate: float, weight_decay: float
    ) -> list[_Update]:
        return [
            _Update(
                state,
                gradient,
                (vocabulary_rate if state.kind.is_vocabulary else learning_rate) / state.kind.width_ratio,
                # Decay does not depend on the width: it is multiplied by the divided learning rate.
                weight_decay * state.kind.width_ratio if state.kind.decay else 0.0,
                self.config.adam_eps / state.kind.width_ratio,
            )
            for state, gradient in zip(self.states, gradients, strict=True)
        ]

    def _divisor(self, grad_norm: Tensor) -> Tensor | None:
        """Return the divisor that unscales and clips gradients, an fp64 scalar; None if it is always 1."""
        scale = self.scaler.scale
        if self.config.clip_grad > 0.0:
            excess = (grad_norm + 1e-6) / self.config.clip_grad  # torch's and Megatron's formula
            return excess.clamp_min_(1.0).mul_(scale)
        return None if scale == 1.0 else torch.full_like(grad_norm, scale)

    def _update(
        self,
        pieces: Sequence[tuple[_Update, slice | None]],
        number: Tensor,
        divisor: Tensor | None,
        is_good: Tensor,
    ) -> None:
        """Update elements of states with equal settings; the other arguments are scalars on the device."""
        states = [(update.state, own) for update, own in pieces]
        learning_rate, weight_decay, epsilon = pieces[0][0].settings
        wide = [state.moments if own is None else state.wide_moments(own) for state, own in states]
        adamw_(
            [_part(state.main, own) for state, own in states],
            [moments[EXP_AVG] for moments in wide],
            [moments[EXP_AVG_SQ] for moments in wide],
            [_part(state.rounded, own) for state, own in states if state.rounded is not None],
            [_part(update.gradient, own) for update, own in pieces],
            number=number,
            divisor=divisor,
            is_good=is_good,
            learning_rate=learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            weight_decay=weight_decay,
            epsilon=epsilon,
        )
        for (state, own), moments in zip(states, wide, strict=True):
            if own is not None and state.rounding is not None:  # a skipped update keeps all bits
                state.rounding.store(state.moments, moments, own, number)


def _part(tensor: Tensor, elements: slice | None) -> Tensor:
    return tensor if elements is None else tensor[elements]


def _pieces(updates: Sequence[_Update]) -> Iterator[list[tuple[_Update, slice | None]]]:
    """Yield what one kernel updates: whole states (None), and ranges of those that are widened."""
    if whole := [update for update in updates if update.state.rounding is None]:
        yield [(update, None) for update in whole]
    for update in updates:
        if update.state.rounding is not None:
            for own in ranges_in(update.state.main.numel()):
                yield [(update, own)]


def _divide(gradients: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide gradients in place, to the same bits as `adamw_` does."""
    if not gradients:
        return
    if gradients[0].dtype == torch.float64:
        foreach_mul_(list(gradients), divisor.reciprocal())
    else:
        foreach_div_(list(gradients), divisor.float())


_DTYPES = {"bf16": torch.bfloat16, "fp8": E4M3}


class _Span(NamedTuple):
    """Elements [start, stop) of a state that are evenly spaced runs of a full parameter.

    Attributes:
        first: position of the first element in the runs.
        key: key of the parameter's random numbers.
    """

    start: int
    stop: int
    first: int
    runs: EvenRuns
    key: int


class RoundedMoments:
    """Rounding of the moments of one state. See `megalite.kernels.moments` for the formats.

    The random numbers depend on seed, parameter, element and update, so the moments are the same in every
    layout and at every ZeRO stage.

    Attributes:
        dtypes: dtypes of the moments between updates, by torch's names; at least one is narrow.
    """

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        entries: Sequence[BucketEntry],
        owned: slice,
        seed: int,
        topology: Topology,
    ) -> None:
        """Locate the elements in their full parameters.

        Args:
            entries: parameters of the state.
            owned: elements of the bucket in the state.
        """
        self.dtypes = dtypes
        self._spans = [span for entry in entries for span in _spans(entry, owned, seed, topology)]

    @staticmethod
    def constructor(
        config: OptimizerConfig, main_dtype: torch.dtype, seed: int, topology: Topology
    ) -> Callable[[Sequence[BucketEntry], slice], RoundedMoments] | None:
        """Return what makes the rounding of a state; None if moments have the dtype of the main weights."""
        names = {EXP_AVG: config.exp_avg_dtype, EXP_AVG_SQ: config.exp_avg_sq_dtype}
        if not _DTYPES.keys() & names.values():
            return None
        dtypes = {moment: _DTYPES.get(name, main_dtype) for moment, name in names.items()}
        return partial(RoundedMoments, dtypes, seed=seed, topology=topology)

    def widen(self, moments: Mapping[str, Tensor], elements: slice, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return moments of the elements in the dtype of the main weights: copies, or views of such."""
        own = {name: moment[elements] for name, moment in moments.items()}
        if self.copies_for_checkpoint:
            own[EXP_AVG] = wide_exp_avg(own[EXP_AVG], own[EXP_AVG_SQ])
        return {name: moment.to(dtype) for name, moment in own.items()}

    def store(
        self, moments: Mapping[str, Tensor], wide: Mapping[str, Tensor], elements: slice, number: Tensor
    ) -> None:
        """Round what `widen` returned, after an update has changed it.

        Args:
            number: number of the update, an fp32 scalar on the device.
        """
        exact = {name: moment.float() for name, moment in wide.items()}
        is_narrow = {name: moments[name].dtype != wide[name].dtype for name in MOMENTS}
        for span in self._spans:
            held = overlap(slice(span.start, span.stop), elements)
            if held.start >= held.stop:
                continue
            within = slice(held.start - elements.start, held.stop - elements.start)
            round_moments_(
                exact[EXP_AVG][within],
                exact[EXP_AVG_SQ][within],
                moments[EXP_AVG][held] if is_narrow[EXP_AVG] else None,
                moments[EXP_AVG_SQ][held] if is_narrow[EXP_AVG_SQ] else None,
                number,
                span.key,
                base=span.runs.base,
                first=span.first + held.start - span.start,
                run_length=span.runs.length,
                run_stride=span.runs.stride,
            )

    @property
    def copies_for_checkpoint(self) -> bool:
        """Return whether `for_checkpoint` returns copies instead of views."""
        return self.dtypes[EXP_AVG] == E4M3

    def for_checkpoint(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return moments for a checkpoint, which any run can load: fp8 as bf16, in host memory, exactly."""
        if not self.copies_for_checkpoint:
            return dict(moments)
        codes = moments[EXP_AVG]
        device = codes.device if codes.is_meta else "cpu"
        copy = torch.empty(codes.shape, dtype=torch.bfloat16, device=device)
        for own in ranges_in(codes.numel()):
            copy[own] = self.widen(moments, own, torch.bfloat16)[EXP_AVG].to(device)
        return {**moments, EXP_AVG: copy}


def ranges_in(numel: int) -> Iterator[slice]:
    """Yield the ranges of elements that an update widens at once, so that copies need little memory."""
    for start in range(0, numel, RANGE_SIZE):
        yield slice(start, min(start + RANGE_SIZE, numel))


def _spans(entry: BucketEntry, owned: slice, seed: int, topology: Topology) -> Iterator[_Span]:
    held = overlap(slice(entry.start, entry.end), owned)
    key = site_key(seed, f"{entry.name}.moments")
    parts = list(even_runs(entry.spec, topology))
    size = (entry.end - entry.start) // len(parts)
    for number, runs in enumerate(parts):
        start = entry.start + number * size
        part = overlap(slice(start, start + size), held)
        if part.start < part.stop:
            yield _Span(part.start - owned.start, part.stop - owned.start, part.start - start, runs, key)
