"""The optimizers' base class, and the optimizer of ZeRO stages 0 to 2 on flat buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.collectives import all_reduce
from megalite.distributed.observer import Observer, observed
from megalite.distributed.topology import Axis, Topology
from megalite.optim.adamw import AdamW, BucketState, OptimizerState, kinds_of
from megalite.optim.flat_buffers import Bucket, ParameterShard, make_buckets
from megalite.optim.global_norm import global_norm, sum_of_squares
from megalite.optim.gradient_buckets import (
    GRADIENT_BUFFERS,
    MESSAGE_DTYPES,
    GradientBuffer,
    GradReducer,
    main_dtype,
)
from megalite.optim.loss_scaler import build_loss_scaler
from megalite.optim.offload import OptimizerOffload, open_offload
from megalite.optim.weight_gatherer import ForwardUnit, WeightGatherer
from megalite.tensor_parallel.counter_random import fill_initial
from megalite.tensor_parallel.parameter_spec import num_used
from megalite.tensor_parallel.tied_embedding import TiedWeight, sum_tied_embedding_grads
from megalite.tensor_parallel.weight_gradient_store import WeightGradient, run_stored
from megalite.torch_private import foreach_copy_, foreach_mul_


class CountedShard(NamedTuple):
    """Elements of a parameter that this rank counts in norms, and no other rank of the world.

    Attributes:
        main: main weights, ``[n]``.
        gradient: complete gradient, ``[n]``.
        moments: AdamW's moments by torch's names, ``[n]``.
        num_used: number of elements before the vocabulary's padding.
    """

    name: str
    main: Tensor
    gradient: Tensor
    moments: Mapping[str, Tensor]
    num_used: int


class ParameterBytes(NamedTuple):
    """Bytes that this rank holds for a parameter from one iteration to the next."""

    weights: int
    gradients: int
    optimizer: int


class BaseOptimizer(ABC):
    """Computes norms, clips and runs AdamW on reduced gradients; the base class for all ZeRO stages.

    Attributes:
        scaler: its scale multiplies the loss of each backward pass.
        observers: notified of each part of the work, by Megatron-LM's timer names.
        offload: holds the states that are not on the device; None if all states are on the device.
        unreached: names of the parameters that backward did not reach in the last iteration on this rank.
    """

    def __init__(
        self,
        states: Sequence[OptimizerState],
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        offload: OptimizerOffload | None,
    ) -> None:
        self.topology = topology
        self.offload = offload
        self.scaler = build_loss_scaler(config, dtype)
        self.observers: list[Observer[str]] = []
        self.unreached: list[str] = []
        self.adamw = AdamW(states, config, self.scaler, self.observers, topology.device, offload)
        # With sequence parallelism, a replicated parameter's gradient only covers the rank's own positions:
        # the sum over tp completes it.
        self.sums_over_tp = parallel.sequence_parallel and topology.tp.size > 1

    def begin(self, num_microbatches: int) -> None:
        """Start an iteration with this number of backward passes; their gradients replace the old ones."""
        if self.offload is not None:
            self.offload.begin()

    def finish_weights(self) -> None:
        """Wait until weights and state can be read or changed outside of forward."""
        if self.offload is not None:
            self.offload.finish()

    def run_stored(self, gradients: Iterable[WeightGradient]) -> None:
        """Compute and accumulate the weight gradients stored by a schedule with split backward."""
        run_stored(gradients)

    @abstractmethod
    def gradient(self, name: str) -> Tensor:
        """Return a parameter's complete gradient, local shape, unscaled; every rank of dp must call it."""

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """Return a parameter's weights in its local shape; every rank of dp must call it."""

    @abstractmethod
    def weights(self) -> dict[str, ParameterShard]:
        """Return the model's weights for a checkpoint."""

    @abstractmethod
    def _parameter_state(self) -> Iterator[tuple[str, ParameterShard]]:
        """Yield separate main weights and moments, as ``NAME.main`` and ``NAME.MOMENT``."""

    @abstractmethod
    def _weight_and_gradient_bytes(self) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter's name, and the bytes of its weights and of its gradient on this rank."""

    @abstractmethod
    def _finish_reduction(self) -> None:
        """Wait until the gradients are summed over dp."""

    @abstractmethod
    def _owned_gradients(self) -> list[Tensor]:
        """Return the gradients of the elements that this rank updates, one for each of AdamW's states."""

    @abstractmethod
    def _norm_gradients(self) -> Iterable[Tensor]:
        """Return the gradients that only this rank of the world counts in the norm."""

    @abstractmethod
    def counted_shards(self) -> Iterator[CountedShard]:
        """Yield the elements that only this rank counts, by parameter."""

    @abstractmethod
    def _named_gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Return the gradients of the elements that this rank updates, by parameter."""

    def finish_gradients(self, scale: Tensor | None = None) -> Tensor:
        """Complete the gradients over all ranks.

        Args:
            scale: factor on the gradients, a scalar on the device.

        Returns:
            The global gradient norm without the loss scale, an fp64 scalar on the device.
        """
        with observed(self.observers, "all-grads-sync"):
            self._finish_reduction()
            if self.sums_over_tp:
                self._sum_over_tp()
        with observed(self.observers, "optimizer-unscale-and-check-inf"):
            if scale is not None and (gradients := self._owned_gradients()):
                foreach_mul_(gradients, scale)
                if self.offload is not None:
                    self.offload.forget_gradients()  # backward's copies on the host are not scaled
            return global_norm(self._norm_gradients(), self.topology) / self.scaler.scale

    def _is_complete(self, state: OptimizerState) -> bool:
        """Return whether a state's gradient is complete once it is summed over dp."""
        return state.is_cut or not self.sums_over_tp

    @torch.no_grad()
    def _sum_over_tp(self) -> None:
        """All-reduce the gradients of parameters that are replicated over tp, in one message."""
        pairs = zip(self.adamw.states, self._owned_gradients(), strict=True)
        if gradients := [gradient for state, gradient in pairs if not self._is_complete(state)]:
            total = all_reduce(torch.cat(gradients), self.topology.tp)
            foreach_copy_(gradients, list(total.split([tensor.numel() for tensor in gradients])))

    def step(
        self,
        learning_rate: float,
        weight_decay: float,
        grad_norm: Tensor,
        is_allowed: Tensor | None = None,
        decoupled_learning_rate: float | None = None,
    ) -> None:
        """Clip the gradients to the config's norm and update the weights.

        The device decides: if the norm is not finite or the update is not allowed, weights and state keep
        their values. The loss scaler is not updated.

        Args:
            grad_norm: the result of `finish_gradients`.
            is_allowed: a bool scalar on the device; None allows the update.
            decoupled_learning_rate: rate of the word embedding and the output layer, with --decoupled-lr.
        """
        gradients = self._owned_gradients()
        if self.offload is not None and grad_norm.is_cuda:
            # The host is about to read whether to update. Waiting here lets a hang report name the wait.
            self.topology.to_host(grad_norm)
        self.adamw.step(
            gradients, learning_rate, weight_decay, grad_norm, is_allowed, decoupled_learning_rate
        )

    def params_norm(self) -> float:
        """Return the 2-norm of the whole model's weights; every rank must call it.

        This and `num_zeros` do not count the vocabulary's padding, whose size depends on the layout.
        """
        if self.offload is not None:
            self.offload.finish()
        used = (shard.main[: shard.num_used] for shard in self.counted_shards() if shard.num_used)
        return self.topology.to_host(global_norm(used, self.topology)).item()

    def num_zeros(self) -> int:
        """Return the number of zeros in the whole model's complete gradient; every rank must call it."""
        count = torch.zeros((), dtype=torch.int64, device=self.topology.device)
        for shard in self.counted_shards():
            count += (shard.gradient[: shard.num_used] == 0.0).sum()
        return int(self.topology.to_host(all_reduce(count, self.topology.world)).item())

    def gradient_squares(self) -> dict[str, Tensor]:
        """Return the sum of squares of the gradient elements that this rank counts, by parameter name.

        All ranks together count each element once. An update may have unscaled and clipped the gradients,
        which only keeps their ratios.
        """
        device = self.topology.device
        return {shard.name: sum_of_squares([shard.gradient], device) for shard in self.counted_shards()}

    def bad_gradients(self) -> list[str]:
        """Return the names of parameters whose complete gradient is not finite in this rank's elements."""
        return [name for name, gradient in self._named_gradients() if not gradient.isfinite().all()]

    def parameter_bytes(self) -> dict[str, ParameterBytes]:
        """Return the bytes of each parameter's weights, gradient and optimizer state, without padding."""
        state = Counter[str]()
        for name, shard in self._parameter_state():
            state[name.rpartition(".")[0]] += shard.tensor.nbytes
        return {
            name: ParameterBytes(weights, gradients, state[name])
            for name, weights, gradients in self._weight_and_gradient_bytes()
        }

    def state(self) -> dict[str, Tensor | ParameterShard]:
        """Return everything that a checkpoint holds besides the model's weights, as views.

        Main weights, if separate from the model's weights, and moments are named ``NAME.main`` and
        ``NAME.MOMENT``. They have the parameter's shape: this rank's slice of it, or the shard that it owns.
        """
        state: dict[str, Tensor | ParameterShard] = dict(self._parameter_state())
        scaler = {f"loss_scaler.{name}": tensor for name, tensor in self.scaler.state().items()}
        return {**state, "num_steps": self.adamw.num_steps, **scaler}

    def check_state(self) -> None:
        """Check that offloaded state in a file has not changed, before a checkpoint reads `state`.

        Raises:
            StateFileError: it has changed.
        """
        if self.offload is not None:
            self.offload.check()

    def seal_state(self) -> None:
        """Accept new values of `state`, which a checkpoint has written."""
        if self.offload is not None:
            self.offload.seal()


class Optimizer(BaseOptimizer):
    """The optimizer of ZeRO stages 0 to 2: owns the rank's gradients from backward to the update.

    Attributes:
        buffers: gradients of each bucket.
        states: main weights and moments of the elements of each bucket that this rank owns, in the same
            order.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        tied: TiedWeight | None,
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        units: Sequence[ForwardUnit] = (),
        fuses_weight_gradients: bool = False,
        graphs_add: bool = False,
    ) -> None:
        """Move the parameters into buckets and allocate gradients and state.

        Args:
            named_parameters: parameters of this rank, in the order in which forward uses them.
            tied: tied word embedding, if the pipeline has more than one rank and this rank holds the first or
                the last stage.
            parallel: ZeRO stage, bucket size, overlap and sequence parallelism.
            dtype: dtype of the weights.
            units: this rank's modules in the order in which forward calls them; each waits for its weights
                if the all-gather overlaps forward.
            fuses_weight_gradients: linear layers add their weight gradients to the buffers.
            graphs_add: graphs of torch.compile add weight gradients to the buffers.
        """
        self.tied = tied
        stage = parallel.zero_stage_among(topology.dp.shard.size)
        separates_vocabulary = config.decoupled_lr is not None
        self.buffers = self._make_buffers(
            list(named_parameters), parallel, topology.dp, stage, separates_vocabulary
        )
        numels = [buffer.owned.stop - buffer.owned.start for buffer in self.buffers]
        offload = open_offload(
            numels,
            kinds_of(dtype),
            main_dtype(dtype),
            dtype,
            config,
            parallel,
            topology,
            order=range(len(numels))[::-1],  # backward fills the buffers in the opposite order
        )
        num_offloaded = 0 if offload is None else offload.count
        self.states = [
            BucketState(
                buffer.bucket,
                buffer.owned,
                offload.tensors(number) if offload and number < num_offloaded else None,
            )
            for number, buffer in enumerate(self.buffers)
        ]
        super().__init__(self.states, config, parallel, topology, dtype, offload)
        self._number_of = {buffer.bucket: number for number, buffer in enumerate(self.buffers)}
        self.reducer = self._make_reducer(parallel, topology, graphs_add and fuses_weight_gradients)
        self.main_grads = self.reducer.main_grads() if fuses_weight_gradients else {}
        self.gatherer = self._make_gatherer(units, parallel, topology, stage)

    def _make_buffers(
        self,
        pairs: Sequence[tuple[str, nn.Parameter]],
        parallel: ParallelConfig,
        dp: Axis,
        stage: int,
        separates_vocabulary: bool,
    ) -> list[GradientBuffer]:
        """Return buffers in the order in which backward fills them; a tied weight's is last."""
        message_dtype = MESSAGE_DTYPES[parallel.grad_communication_dtype]
        tied = self.tied.weight if self.tied else None
        others = [pair for pair in pairs if pair[1] is not tied]
        buckets = make_buckets(others, dp, parallel.ddp_bucket_size, separates_vocabulary)
        buffers = [GRADIENT_BUFFERS[stage](bucket, dp, message_dtype) for bucket in buckets]
        if tied is not None:
            bucket = Bucket([pair for pair in pairs if pair[1] is tied], dp)
            # Full at every ZeRO stage: the gradients of two pipeline stages must be summed before scattering.
            buffers.append(GRADIENT_BUFFERS[min(stage, 1)](bucket, dp, message_dtype))
        return buffers

    def _make_reducer(self, parallel: ParallelConfig, topology: Topology, graphs_add: bool) -> GradReducer:
        dp, overlap = topology.dp, parallel.overlap_grad_reduce
        on_complete = None if self.offload is None else self._copy_to_host
        if self.tied is None:
            return GradReducer(self.buffers, dp, overlap, graphs_add=graphs_add, on_complete=on_complete)
        sum_copies = partial(sum_tied_embedding_grads, pp=topology.pp) if self.tied.has_other_copy else None
        return GradReducer(
            self.buffers[:-1], dp, overlap, self.buffers[-1], sum_copies, graphs_add, on_complete
        )

    def _make_gatherer(
        self, units: Sequence[ForwardUnit], parallel: ParallelConfig, topology: Topology, stage: int
    ) -> WeightGatherer | None:
        if stage == 0 and self.offload is None:
            return None
        overlaps = stage == 0 or parallel.gathers_under_forward(topology.device.type)
        return WeightGatherer(
            [buffer.bucket for buffer in self.buffers],
            topology.dp.shard if stage > 0 else None,
            units if overlaps else (),
            # With tensor parallelism a GPU starts kernels in launch order (`settings_for`): forward would not
            # begin before the last bucket.
            one_ahead=topology.tp.size > 1,
            wait_for_update=None if self.offload is None else self._wait_for_update,
        )

    def _copy_to_host(self, buffer: GradientBuffer) -> None:
        """Start to copy a bucket's complete gradient if its state is offloaded."""
        assert self.offload is not None
        number = self._number_of[buffer.bucket]
        if number < self.offload.count and self._is_complete(self.states[number]):
            self.offload.copy_gradient(number, buffer.owned_grad)

    def _wait_for_update(self, bucket: Bucket) -> None:
        assert self.offload is not None
        self.offload.wait([self._number_of[bucket]])

    def initialize_main(self, seed: int) -> None:
        """Draw separate main weights again, so that they start unrounded.

        A rank draws all of its parameters and keeps the elements that it owns; nothing is sent.
        """
        for state in self.states:
            if not state.has_own_main:
                continue
            full = torch.zeros(state.bucket.size, dtype=state.main.dtype, device=state.bucket.weight.device)
            for entry in state.bucket.entries:
                fill_initial(state.bucket.view(full, entry), entry.name, entry.spec, seed, self.topology)
            state.main.copy_(full[state.owned])

    def begin(self, num_microbatches: int) -> None:
        super().begin(num_microbatches)
        if self.offload is not None and not self.offload.keeps_gradients and self.reducer.graphs_add:
            self.offload.finish()  # the update reads the gradients, which are about to be zeroed
        self.reducer.begin(num_microbatches)
        for parameter, main_grad in self.main_grads.items():
            parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def finish_gradients(self, scale: Tensor | None = None) -> Tensor:
        for parameter in self.main_grads:  # backward outside of an iteration only uses autograd
            parameter.main_grad = None  # type: ignore[attr-defined]
        return super().finish_gradients(scale)

    def step(
        self,
        learning_rate: float,
        weight_decay: float,
        grad_norm: Tensor,
        is_allowed: Tensor | None = None,
        decoupled_learning_rate: float | None = None,
    ) -> None:
        super().step(learning_rate, weight_decay, grad_norm, is_allowed, decoupled_learning_rate)
        if self.gatherer is not None:
            self.gatherer.start()

    def finish_weights(self) -> None:
        if self.gatherer is not None:
            self.gatherer.finish()
        super().finish_weights()

    def gradient(self, name: str) -> Tensor:
        for buffer in self.buffers:
            for entry in buffer.bucket.entries:
                if entry.name == name:
                    return buffer.bucket.view(buffer.all_gather(), entry) / self.scaler.scale
        raise KeyError(name)

    def weight(self, name: str) -> Tensor:
        shard = self.weights()[name]
        return shard.tensor.view(shard.shape)

    def weights(self) -> dict[str, ParameterShard]:
        """Return the model's weights for a checkpoint, as views of all of this rank's slices."""
        return {
            entry.name: ParameterShard(
                entry.parameter.data.view(-1), 0, tuple(entry.parameter.shape), entry.spec, is_replicated=True
            )
            for buffer in self.buffers
            for entry in buffer.bucket.entries
        }

    def _parameter_state(self) -> Iterator[tuple[str, ParameterShard]]:
        for state in self.states:
            for entry in state.bucket.entries:
                for kind, tensor in state.tensors():
                    yield f"{entry.name}.{kind}", state.parameter_shard(tensor, entry)

    def _weight_and_gradient_bytes(self) -> Iterator[tuple[str, int, int]]:
        for buffer in self.buffers:
            for entry in buffer.bucket.entries:
                held = min(entry.end, buffer.held.stop) - max(entry.start, buffer.held.start)
                yield entry.name, entry.parameter.nbytes, max(0, held) * buffer.dtype.itemsize

    def _finish_reduction(self) -> None:
        self.unreached = [name for buffer in self.buffers for name in buffer.unreached]
        self.reducer.finish()

    def _owned_gradients(self) -> list[Tensor]:
        return [buffer.owned_grad for buffer in self.buffers]

    def _norm_gradients(self) -> list[Tensor]:
        return [buffer.counted_grad for buffer in self.buffers if self._counts(buffer.bucket)]

    def counted_shards(self) -> Iterator[CountedShard]:
        for state, buffer in zip(self.states, self.buffers, strict=True):
            counted = buffer.bucket.counted
            for entry in buffer.bucket.entries if self._counts(buffer.bucket) else ():
                start, end = max(entry.start, counted.start), min(entry.end, counted.stop)
                if start < end:
                    used = entry.start + num_used(entry.spec, self.topology) - start
                    owned = slice(start - state.owned.start, end - state.owned.start)
                    moments = {name: moment[owned] for name, moment in state.moments.items()}
                    grad = buffer.counted_grad[start - counted.start : end - counted.start]
                    yield CountedShard(entry.name, state.main[owned], grad, moments, max(0, used))

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for state, buffer in zip(self.states, self.buffers, strict=True):
            for entry in buffer.bucket.entries:
                yield entry.name, state.parameter_shard(buffer.owned_grad, entry).tensor

    def _counts(self, bucket: Bucket) -> bool:
        """Return whether this rank counts a bucket in norms: replicated copies are counted once."""
        is_copy = self.tied is not None and self.tied.has_other_copy and not self.topology.pp.is_first
        if is_copy and bucket is self.buffers[-1].bucket:
            return False
        return bucket.is_cut or self.topology.tp.is_first
