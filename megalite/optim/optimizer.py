"""AdamW on flat weights: gradients in, clipped step out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.observer import Observer, observed
from megalite.optim.adamw import AdamW, BucketState
from megalite.optim.flat import Bucket, make_buckets
from megalite.optim.gather import Unit, WeightGatherer
from megalite.optim.gradients import GRADIENTS, MESSAGE_DTYPES, WholeGradients
from megalite.optim.loss_scaler import build_loss_scaler
from megalite.optim.norm import global_norm, sum_of_squares
from megalite.optim.part import Part
from megalite.optim.reducer import GradReducer
from megalite.optim.update import ClippedUpdate
from megalite.parallel.collectives import all_reduce
from megalite.parallel.rng import fill_initial
from megalite.parallel.shard import num_used
from megalite.parallel.tied import TiedWeight, sum_over_edges
from megalite.topology import Topology


class Optimizer:
    """Owns the gradients of one rank from backward's first addition to the update of the weights.

    Attributes:
        gradients: of each bucket.
        states: main weights and moments of what this rank owns of each bucket, in the same order.
        scaler: gives the factor that the loss of each backward pass must be multiplied by.
        observers: told of each part of the work, by the name of Megatron-LM's timer.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        tied: TiedWeight | None,
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        units: Sequence[Unit] = (),
        fuses_weight_gradients: bool = False,
    ) -> None:
        """Moves the parameters into buckets and makes the gradients' buffers and the state.

        Args:
            named_parameters: of this rank, in the order of their use in forward.
            tied: a word table that two of the pipeline's stages use, on a rank that has it.
            parallel: ZeRO stage, size of the buckets, what is overlapped, and whether parameters that are not
                cut over tp get the gradient of their own rank's positions alone.
            dtype: of the weights.
            units: the rank's modules in the order in which forward calls them; weights that are gathered
                under forward are waited for there.
            fuses_weight_gradients: linear layers add their weight gradients to the buffers themselves.
        """
        self.topology = topology
        self.tied = tied
        self.sums_over_tp = parallel.sequence_parallel and topology.tp.size > 1
        stage = parallel.zero_stage_among(topology.dp.size)
        self.gradients = self._make_gradients(list(named_parameters), parallel, stage)
        self.reducer = self._make_reducer(parallel)
        self.main_grads = self.reducer.main_grads() if fuses_weight_gradients else {}
        self.states = [BucketState(each.bucket, each.owned) for each in self.gradients]
        self.adamw = AdamW(self.states, config, topology.device)
        self.scaler = build_loss_scaler(config, dtype)
        self.observers: list[Observer[str]] = []
        self.update = ClippedUpdate(self.adamw, self.scaler, config.clip_grad, self.observers)
        self.gatherer: WeightGatherer | None = None
        if stage > 0:
            buckets = [each.bucket for each in self.gradients]
            self.gatherer = WeightGatherer(
                buckets, topology.dp, units if parallel.overlap_param_gather else ()
            )

    def initialize_main(self, seed: int) -> None:
        """Draws the main weights anew where they are finer than the model's, which are those rounded.

        A rank draws the parameters that it holds and keeps what it owns: as ever, nothing is sent.
        """
        for state in self.states:
            if not state.has_own_main:
                continue
            whole = torch.zeros(state.bucket.size, dtype=state.main.dtype, device=state.main.device)
            for slot in state.bucket.slots:
                fill_initial(state.bucket.view(whole, slot), slot.name, slot.spec, seed, self.topology)
            state.main.copy_(whole[state.owned])

    def begin(self, num_microbatches: int) -> None:
        """Empties the gradients and gets ready for that many backward passes."""
        self.reducer.begin(num_microbatches)
        for parameter, main_grad in self.main_grads.items():
            parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def finish_gradients(self, scale: Tensor | None = None) -> Tensor:
        """Completes the gradients over all ranks.

        Args:
            scale: a scalar on the device that they are multiplied by.

        Returns:
            Their global norm, as if the scaler had not scaled the loss: an fp64 scalar on the device.
        """
        for parameter in self.main_grads:  # a backward pass outside of an iteration is autograd's alone
            parameter.main_grad = None  # type: ignore[attr-defined]
        with observed(self.observers, "all-grads-sync"):
            self.reducer.finish()
            if self.sums_over_tp:
                self._sum_over_tp()
        with observed(self.observers, "optimizer-unscale-and-check-inf"):
            if scale is not None and self.gradients:
                torch._foreach_mul_([each.summed for each in self.gradients], scale)
            counted = [each.shard for each in self.gradients if self._counts(each.bucket)]
            return global_norm(counted, self.topology) / self.scaler.scale

    def params_norm(self) -> float:
        """Return the 2-norm of the whole model's weights, the same on every rank; every rank calls it.

        Padding of the vocabulary is not counted, as its size depends on the layout; nor by `num_zeros`.
        """
        counted = [
            state.shard[part]
            for state in self.states
            if self._counts(state.bucket)
            for part in self._used(state.bucket)
        ]
        return global_norm(counted, self.topology).item()

    def num_zeros(self) -> int:
        """Return how many elements of the whole model's complete gradient are zero; every rank calls it."""
        count = torch.zeros((), dtype=torch.int64, device=self.topology.device)
        for each in self.gradients:
            if self._counts(each.bucket):
                for part in self._used(each.bucket):
                    count += part.stop - part.start - each.shard[part].count_nonzero()
        return int(all_reduce(count, self.topology.world).item())

    def gradient_squares(self) -> dict[str, Tensor]:
        """Sum of squares of what this rank counts of each parameter's complete gradient, by name.

        The world's ranks count each element once. After an update the gradients are scaled and clipped: only
        their proportions are those of before.
        """
        squares = {}
        for each in self.gradients:
            shard = each.bucket.shard
            for slot in each.bucket.slots if self._counts(each.bucket) else ():
                start, end = max(slot.start, shard.start), min(slot.end, shard.stop)
                if start < end:
                    part = each.shard[start - shard.start : end - shard.start]
                    squares[slot.name] = sum_of_squares([part], self.topology.device)
        return squares

    def bad_gradients(self) -> list[str]:
        """Names of the parameters of whose complete gradient this rank has a part that is not finite."""
        parts = {
            slot.name: state.of_parameter(each.summed, slot)
            for state, each in zip(self.states, self.gradients, strict=True)
            for slot in each.bucket.slots
        }
        return [name for name, part in parts.items() if not part.tensor.isfinite().all()]

    def step(
        self, learning_rate: float, weight_decay: float, grad_norm: Tensor, is_allowed: Tensor | None = None
    ) -> None:
        """Clips the gradients to the config's norm and updates the weights.

        The device decides: where the norm is not finite, or the update is not allowed, weights and state are
        left as they were. The scaler is not told.

        Args:
            grad_norm: what `finish_gradients` has given.
            is_allowed: a bool scalar on the device; by default it is.
        """
        summed = [each.summed for each in self.gradients]
        self.update(summed, learning_rate, weight_decay, grad_norm, is_allowed)
        if self.gatherer is not None:
            self.gatherer.start()

    def finish_weights(self) -> None:
        """Waits until every weight is whole again: to be called before they are read outside of forward."""
        if self.gatherer is not None:
            self.gatherer.finish()

    def gradient(self, name: str) -> Tensor:
        """A parameter's complete gradient, in its local shape and unscaled; every rank of dp calls it."""
        for each in self.gradients:
            for slot in each.bucket.slots:
                if slot.name == name:
                    return each.bucket.view(each.gathered(), slot) / self.scaler.scale
        raise KeyError(name)

    def weight(self, name: str) -> Tensor:
        """A parameter's weights in its local shape."""
        part = self.weights()[name]
        return part.tensor.view(part.shape)

    def weights(self) -> dict[str, Part]:
        """What a checkpoint holds of the model's weights, as views: all of this rank's slices."""
        slots = (slot for each in self.gradients for slot in each.bucket.slots)
        return {
            slot.name: Part(slot.parameter.data.view(-1), 0, tuple(slot.parameter.shape), slot.spec, True)
            for slot in slots
        }

    def state(self) -> dict[str, Tensor | Part]:
        """What a checkpoint holds besides the model's weights, as views.

        Main weights, where the model's are those rounded, and every moment as ``name.moment`` in its
        parameter's shape: all of this rank's slice, or, where ranks share it out, the part that it owns.
        """
        state: dict[str, Tensor | Part] = dict(self._state_of_parameters())
        scaler = {f"loss_scaler.{name}": tensor for name, tensor in self.scaler.state().items()}
        return {**state, "num_steps": self.adamw.num_steps, **scaler}

    def _state_of_parameters(self) -> Iterator[tuple[str, Part]]:
        for state in self.states:
            for slot in state.bucket.slots:
                for what, tensor in state.tensors():
                    yield f"{slot.name}.{what}", state.of_parameter(tensor, slot)

    def _make_gradients(
        self, pairs: Sequence[tuple[str, nn.Parameter]], parallel: ParallelConfig, stage: int
    ) -> list[WholeGradients]:
        """Buffers in the order in which backward fills them; a tied weight's come last."""
        dp, message_dtype = self.topology.dp, MESSAGE_DTYPES[parallel.grad_communication_dtype]
        weight = self.tied.weight if self.tied else None
        others = [pair for pair in pairs if pair[1] is not weight]
        buckets = make_buckets(others, dp, parallel.ddp_bucket_size)
        gradients = [GRADIENTS[stage](bucket, dp, message_dtype) for bucket in buckets]
        if self.tied is not None:
            alone = Bucket([pair for pair in pairs if pair[1] is weight], dp)
            # Whole until the parts of two stages, or of two passes, are added up, whatever the ZeRO stage.
            gradients.append(GRADIENTS[min(stage, 1)](alone, dp, message_dtype))
        return gradients

    def _make_reducer(self, parallel: ParallelConfig) -> GradReducer:
        dp, overlap = self.topology.dp, parallel.overlap_grad_reduce
        if self.tied is None:
            return GradReducer(self.gradients, dp, overlap)
        complete = partial(sum_over_edges, pp=self.topology.pp) if self.tied.is_copied else None
        return GradReducer(self.gradients[:-1], dp, overlap, last=self.gradients[-1], complete=complete)

    @torch.no_grad()
    def _sum_over_tp(self) -> None:
        """Completes the gradients of parameters that every tp rank has, in one message."""
        partial_sums = [each.summed for each in self.gradients if not each.bucket.is_cut]
        if partial_sums:
            total = all_reduce(torch.cat(partial_sums), self.topology.tp)
            sizes = [tensor.numel() for tensor in partial_sums]
            torch._foreach_copy_(partial_sums, list(total.split(sizes)))

    def _used(self, bucket: Bucket) -> Iterator[slice]:
        """Yield the parts of this rank's shard of a bucket that belong to parameters and are no padding."""
        shard = bucket.shard
        for slot in bucket.slots:
            start = max(slot.start, shard.start)
            end = min(slot.start + num_used(slot.spec, self.topology), shard.stop)
            if start < end:
                yield slice(start - shard.start, end - shard.start)

    def _counts(self, bucket: Bucket) -> bool:
        """Whether this rank counts a bucket in the norm: copies on several ranks are counted once."""
        is_copy = self.tied is not None and self.tied.is_copied and not self.topology.pp.is_first
        if is_copy and bucket is self.gradients[-1].bucket:
            return False
        return bucket.is_cut or self.topology.tp.is_first
