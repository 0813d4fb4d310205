"""The optimizer of all ZeRO stages, on flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.axis import Axis, observed
from megalite.distributed.collectives import all_reduce, flat_all_gather
from megalite.distributed.topology import Topology
from megalite.optim.adamw import AdamW, BucketState, RoundedMoments, offloadable_kinds
from megalite.optim.averaged_weights import AveragedWeights
from megalite.optim.flat_buffers import Bucket, BucketEntry, make_buckets, overlap, parameter_kind
from megalite.optim.gradient_buckets import (
    GRADIENT_BUFFERS,
    MESSAGE_DTYPES,
    GradientBuffer,
    GradReducer,
    main_dtype,
)
from megalite.optim.gradient_scale import CountedShard, build_loss_scaler, global_norm
from megalite.optim.muon import Muon
from megalite.optim.offload import OptimizerOffload
from megalite.optim.post_step_hooks import PostStepHook
from megalite.optim.state_storage import StateSize
from megalite.optim.weight_gathering import ChunkModules, ShardedWeights, WeightGatherer, bucket_units
from megalite.pipeline.schedules import SCHEDULES
from megalite.tensor_parallel.counter_random import fill_initial
from megalite.tensor_parallel.fp8 import gathered_gemm_of
from megalite.tensor_parallel.parameter_spec import ParameterShard, num_used, spec_of
from megalite.tensor_parallel.vocab_parallel import TiedWeight, sum_tied_embedding_grads
from megalite.utils.torch_private import foreach_copy_, foreach_mul_


class Optimizer:
    """Gradients of a rank from backward to the update: norms, clipping, AdamW and Muon.

    Attributes:
        buffers: gradients of each bucket, in the order in which backward fills them.
        states: main weights and moments of the elements that this rank owns, for each section of each
            bucket, in the same order; some may be empty.
        updated: the states with elements.
        shards_weights: whether ZeRO shards the weights (stage 3).
        gatherer: completes the weights that other ranks update.
        scaler: its scale multiplies the loss of each backward pass.
        offload: holds the states that are not on the device; None if all states are on the device.
        post_step_hooks: change the model after an update. `build_optimizer` sets them.
        averages: exponential moving averages of the weights; None without --ema-decay.
        unreached: names of the parameters that backward did not reach in the last iteration on this rank.
    """

    post_step_hooks: Sequence[PostStepHook] = ()

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        tied: TiedWeight | None,
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        chunks: Sequence[ChunkModules] = (),
        fuses_weight_gradients: bool = False,
        graphs_add: bool = False,
        keeps_weights: bool = False,
        seed: int = 0,
    ) -> None:
        """Move the parameters into buckets and allocate gradients and state.

        Args:
            named_parameters: parameters of this rank, in the order in which forward uses them.
            tied: tied word embedding, if the pipeline has more than one rank and this rank holds the first or
                the last stage.
            chunks: this rank's model chunks, whose units wait for their weights if the all-gather overlaps
                forward, and at ZeRO stage 3.
            fuses_weight_gradients: linear layers add their weight gradients to the buffers.
            graphs_add: graphs of torch.compile add weight gradients to the buffers.
            keeps_weights: at ZeRO stage 3, gather each weight once per iteration, and keep it until the last
                backward.
            seed: seed of the rounding of moments in 16 or 8 bits.
        """
        self.topology, self.tied, self.dtype = topology, tied, dtype
        self.stage = parallel.zero_stage_among(topology.replicas.shard.size)
        self.shards_weights = self.stage == 3
        self.scaler = build_loss_scaler(config, dtype)
        self.unreached: list[str] = []
        groups = self._make_buckets(list(named_parameters), chunks, config, parallel)
        self.buffers = [self._make_buffer(bucket, parallel) for group in groups for bucket in group]
        self._buffer_of = {buffer.bucket: buffer for buffer in self.buffers}
        self.offload, self.states = self._make_states(config, parallel, seed)
        self.updated = [state for state in self.states if state.main.numel()]
        self._states_of: dict[Bucket, dict[int, BucketState]] = {}
        for number, state in enumerate(self.updated):
            self._states_of.setdefault(state.bucket, {})[number] = state
        others = [state for state in self.updated if not state.kind.is_matrix]
        matrices = [state for state in self.states if state.kind.is_matrix]  # some have no elements here
        self.adamw = AdamW(others, config, self.scaler, topology.observers, topology.device, self.offload)
        self.muon = Muon(matrices, config, topology, dtype) if matrices else None
        decay = config.ema_decay
        self.averages = None if decay is None else AveragedWeights(self.states, decay, self.offload)
        self.reducer = self._make_reducer(groups, parallel, graphs_add and fuses_weight_gradients)
        self._summed_last = [
            buffer for buffer in self.buffers if self.shards_weights and self._is_copied(buffer.bucket)
        ]
        self.gatherer: WeightGatherer | ShardedWeights = (
            self._shard_weights(chunks, list(self._buffer_of), keeps_weights)
            if self.shards_weights
            else self._make_gatherer(chunks, parallel)
        )
        self.main_grads = self.reducer.main_grads() if fuses_weight_gradients else {}

    def _make_buckets(
        self,
        pairs: list[tuple[str, nn.Parameter]],
        chunks: Sequence[ChunkModules],
        config: OptimizerConfig,
        parallel: ParallelConfig,
    ) -> list[list[Bucket]]:
        """Return groups of buckets that backward fills in order."""
        tied = None if self.tied is None else self.tied.weight
        kind_of = partial(parameter_kind, config=config)

        def replicas_of(parameter: nn.Parameter) -> Axis:
            return spec_of(parameter).parameter_axes.replicas(self.topology)

        def new_bucket(pairs: Sequence[tuple[str, nn.Parameter]]) -> Bucket:
            first = pairs[0][1]
            is_sharded = self.shards_weights or gathered_gemm_of(first) is not None
            main = main_dtype(self.dtype) if is_sharded else None
            return Bucket(pairs, replicas_of(first), kind_of=kind_of, main_dtype=main)

        if self.shards_weights:
            splits = SCHEDULES[parallel.schedule].splits_backward
            return bucket_units(chunks, pairs, new_bucket, replicas_of, tied, splits_backward=splits)
        others = [pair for pair in pairs if pair[1] is not tied]
        buckets = make_buckets(others, new_bucket, parallel.ddp_bucket_size, kind_of)
        if tied is not None:
            buckets.append(new_bucket([pair for pair in pairs if pair[1] is tied]))
        return [buckets]

    def _make_buffer(self, bucket: Bucket, parallel: ParallelConfig) -> GradientBuffer:
        stage, is_tied = self.stage, self._is_tied(bucket)
        if is_tied and stage == 2:
            stage = 1  # full: the gradients of two pipeline stages are summed before scattering
        message_dtype = MESSAGE_DTYPES[parallel.grad_communication_dtype]
        buffer = GRADIENT_BUFFERS[stage](bucket, message_dtype)
        if is_tied and self.tied is not None:
            buffer.num_expected = self.tied.num_gradients  # from the first and from the last stage
        return buffer

    def _make_states(
        self, config: OptimizerConfig, parallel: ParallelConfig, seed: int
    ) -> tuple[OptimizerOffload | None, list[BucketState]]:
        sections = [
            (buffer, section, overlap(slice(section.start, section.end), buffer.owned))
            for buffer in self.buffers
            for section in buffer.bucket.sections
        ]
        main, has_ema = main_dtype(self.dtype), config.ema_decay is not None
        has_own_main = main != self.dtype and not self.shards_weights  # sharded main weights are gathered
        kinds = offloadable_kinds(has_own_main=has_own_main, has_ema=has_ema)
        numels = [owned.stop - owned.start for *_, owned in sections if owned.start < owned.stop]
        offload = None
        if config.offloads_optimizer:
            offload = OptimizerOffload(
                [StateSize(numel, main, kinds) for numel in numels],
                main if self.shards_weights else self.dtype,
                config,
                parallel,
                self.topology,
                order=range(len(numels))[::-1],  # backward fills the buffers in the opposite order
            )
        new_rounding = RoundedMoments.constructor(config, main, seed, self.topology)
        tensors = map(offload.storage.tensors, range(offload.count)) if offload else iter(())
        return offload, [
            BucketState(
                buffer.bucket,
                section,
                buffer.owned,
                next(tensors, None) if owned.start < owned.stop else None,
                has_ema=has_ema,
                new_rounding=None if section.kind.is_matrix else new_rounding,
            )
            for buffer, section, owned in sections
        ]

    def _make_reducer(
        self, groups: Sequence[Sequence[Bucket]], parallel: ParallelConfig, graphs_add: bool
    ) -> GradReducer:
        overlap = parallel.overlap_grad_reduce or self.shards_weights
        on_complete = None if self.offload is None else self._copy_to_host
        buffers = [[self._buffer_of[bucket] for bucket in group] for group in groups]
        tied = sum_copies = None
        if self.tied is not None and not self.shards_weights:
            tied = buffers[0].pop()
            if self.tied.has_other_copy:
                sum_copies = partial(sum_tied_embedding_grads, pp=self.topology.pp)
        return GradReducer(buffers, overlap, tied, sum_copies, graphs_add, on_complete)

    def _shard_weights(
        self, chunks: Sequence[ChunkModules], buckets: Sequence[Bucket], keeps_weights: bool
    ) -> ShardedWeights:
        weights = ShardedWeights(
            chunks,
            buckets,
            keeps_rest=keeps_weights or self.topology.pp.size > 1,
            keeps_layers=keeps_weights,
            wait_for_reductions=self.reducer.wait_for_started if self.shards_weights else lambda: None,
            wait_for_update=None if self.offload is None else self._wait_for_update,
        )
        self.reducer.on_filled = lambda buffer: weights.gradients_are_complete(buffer.bucket)
        return weights

    def _make_gatherer(self, chunks: Sequence[ChunkModules], parallel: ParallelConfig) -> WeightGatherer:
        gathers = self.stage > 0
        full = [bucket for bucket in self._buffer_of if bucket.main is None]
        in_8_bits = [bucket for bucket in self._buffer_of if bucket.main is not None]
        overlaps = (
            parallel.gathers_under_forward(self.topology.device.type) if gathers else self.offload is not None
        )
        return WeightGatherer(
            full,
            gathers,
            [unit for chunk in chunks for unit in chunk.units] if overlaps else (),
            # With tensor parallelism a GPU starts kernels in launch order (`settings_for`): forward would not
            # begin before the last bucket.
            one_ahead=self.topology.tp.size > 1,
            wait_for_update=None if self.offload is None else self._wait_for_update,
            in_8_bits=self._shard_weights(chunks, in_8_bits, keeps_weights=True) if in_8_bits else None,
        )

    def _copy_to_host(self, buffer: GradientBuffer) -> None:
        """Start to copy a bucket's complete gradients whose states are offloaded."""
        assert self.offload is not None
        if self.offload.gradients is None:
            return
        for number, state in self._states_of[buffer.bucket].items():
            if number < self.offload.count and self._is_complete(state):
                self.offload.gradients.copy(number, self._gradient_of(state))

    def _wait_for_update(self, bucket: Bucket) -> None:
        assert self.offload is not None
        self.offload.wait(self._states_of[bucket])

    def initialize_main(self, seed: int) -> None:
        """Draw separate main weights again, so that they start unrounded, and the weights of ZeRO stage 3.

        A rank draws all of its parameters and keeps the elements that it owns; nothing is sent.
        """
        for bucket in self._buffer_of:
            states = [state for state in self.states if state.bucket is bucket]
            if bucket.main is None and not states[0].has_own_main:
                continue
            full = torch.zeros(bucket.size, dtype=states[0].main.dtype, device=bucket.weight.device)
            for entry in bucket.entries:
                fill_initial(bucket.view(full, entry), entry.name, entry.spec, seed, self.topology)
            for state in states:
                state.main.copy_(full[state.owned])
                if state.ema is not None:
                    state.ema.copy_(state.main)

    def begin(self, num_microbatches: int) -> None:
        """Start an iteration with this number of backward passes; their gradients replace the old ones."""
        if self.offload is not None:
            self.offload.begin()
        self.gatherer.free()
        for hook in self.post_step_hooks:
            hook.begin()
        self.reducer.begin(num_microbatches)
        for parameter, main_grad in self.main_grads.items():
            parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def finish_gradients(self, scale: Tensor | None = None) -> Tensor:
        """Complete the gradients over all ranks.

        Args:
            scale: factor on the gradients, a scalar on the device.

        Returns:
            The global gradient norm without the loss scale, an fp64 scalar on the device.
        """
        for parameter in self.main_grads:  # backward outside of an iteration only uses autograd
            parameter.main_grad = None  # type: ignore[attr-defined]
        with observed(self.topology.observers, "all-grads-sync"):
            self._finish_reduction()
            self._sum_partial()
        with observed(self.topology.observers, "optimizer-unscale-and-check-inf"):
            if scale is not None and (gradients := self._gradients_of(self.updated)):
                foreach_mul_(gradients, scale)
                if self.offload is not None and self.offload.gradients is not None:
                    self.offload.gradients.forget()  # backward's copies on the host are not scaled
            return global_norm(self._counted_gradients(), self.topology) / self.scaler.scale

    def _finish_reduction(self) -> None:
        """Wait until the gradients are summed over the replicas, and over the copies of a tied weight."""
        self.unreached = [name for buffer in self.buffers for name in buffer.unreached]
        self.reducer.finish()
        self.gatherer.free()
        for buffer in self._summed_last:
            sum_tied_embedding_grads(buffer.owned_grad, self.topology.pp)

    def _is_complete(self, state: BucketState) -> bool:
        """Return whether a state's gradient is complete once it is summed over the replicas."""
        is_summed_later = self._buffer_of[state.bucket] in self._summed_last
        return not is_summed_later and state.kind.parameter_axes.partial_axis(self.topology) is None

    @torch.no_grad()
    def _sum_partial(self) -> None:
        """All-reduce the gradients that are still partial, in one message for each set of axes."""
        partial_over: dict[str, tuple[Axis, list[Tensor]]] = {}
        for state in self.updated:
            if axis := state.kind.parameter_axes.partial_axis(self.topology):
                partial_over.setdefault(axis.name, (axis, []))[1].append(self._gradient_of(state))
        for axis, gradients in partial_over.values():
            total = all_reduce(torch.cat(gradients), axis)
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
        update_matrices = None
        if self.muon is not None:
            gradients = self._gradients_of(self.muon.states)
            update_matrices = partial(self.muon.step, gradients, learning_rate, weight_decay)
        if self.offload is not None and grad_norm.is_cuda:
            # The host is about to read whether to update. Waiting here lets a hang report name the wait.
            self.topology.to_host(grad_norm)
        is_good = self.adamw.step(
            self._gradients_of(self.adamw.states),
            learning_rate,
            weight_decay,
            grad_norm,
            is_allowed,
            decoupled_learning_rate,
            update_matrices,
        )
        for hook in self.post_step_hooks:
            hook.step(is_good)
        if self.averages is not None:
            self.averages.update(self.adamw.num_steps, is_good)
        self.gatherer.start()

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

    def bad_gradients(self) -> list[str]:
        """Return the names of parameters whose complete gradient is not finite in this rank's elements."""
        return [name for name, gradient in self._named_gradients() if not gradient.isfinite().all()]

    def state(self) -> dict[str, Tensor | ParameterShard]:
        """Return everything that a checkpoint holds besides the model's weights, as views.

        Main weights, if separate from the model's weights, and moments are named ``NAME.main`` and
        ``NAME.MOMENT``. They have the parameter's shape: this rank's slice of it, or the shard that it owns.
        """
        shards: dict[str, Tensor | ParameterShard] = {
            f"{entry.name}.{kind}": state.parameter_shard(tensor, entry)
            for state in self.states
            for entry in state.entries
            for kind, tensor in state.tensors()
        }
        scaler = {f"loss_scaler.{name}": tensor for name, tensor in self.scaler.state().items()}
        return {**shards, "num_steps": self.adamw.num_steps, **scaler}

    def check_state(self) -> None:
        """Check that offloaded state in a file has not changed, before a checkpoint reads `state`.

        Raises:
            StateFileError: it has changed.
        """
        if self.offload is not None:
            self.offload.check()

    def seal_state(self, written: Mapping[str, Tensor | ParameterShard]) -> None:
        """Accept new values of `state`, which a checkpoint has written to `written`, an earlier result."""
        for state in self.updated:
            state.seal_copies(written)
        if self.offload is not None:
            self.offload.seal()

    def finish_weights(self) -> None:
        """Wait until weights and state can be read or changed outside of forward."""
        self.gatherer.finish()
        if self.offload is not None:
            self.offload.finish()

    def gradient(self, name: str) -> Tensor:
        """Return a parameter's complete gradient, local shape, unscaled; every replica must call it."""
        buffer, entry = self._find(name)
        return buffer.bucket.view(buffer.all_gather(), entry) / self.scaler.scale

    def weight(self, name: str) -> Tensor:
        """Return a parameter's weights in its local shape; every replica must call it.

        At ZeRO stage 3, these are the main weights.
        """
        buffer, entry = self._find(name)
        bucket = buffer.bucket
        if bucket.main is None:
            return entry.parameter.data
        full = torch.empty(bucket.size, dtype=bucket.main.dtype, device=bucket.main.device)
        flat_all_gather(full, bucket.main, bucket.replicas.shard).wait()
        return bucket.view(full, entry)

    def weights(self) -> dict[str, ParameterShard]:
        """Return the model's weights for a checkpoint, as views of all of this rank's slices.

        At ZeRO stage 3 they are the shards of the main weights, or rounded copies for runs that load rounded
        weights; writing to copies has no effect.
        """
        return {name: weight for state in self.states for name, weight in state.weights()}

    def _find(self, name: str) -> tuple[GradientBuffer, BucketEntry]:
        for buffer in self.buffers:
            for entry in buffer.bucket.entries:
                if entry.name == name:
                    return buffer, entry
        raise KeyError(name)

    def _gradient_of(self, state: BucketState) -> Tensor:
        """Return the complete gradient of a state's elements, once it is reduced."""
        buffer = self._buffer_of[state.bucket]
        start = buffer.owned.start
        return buffer.owned_grad[state.owned.start - start : state.owned.stop - start]

    def _gradients_of(self, states: Sequence[BucketState]) -> list[Tensor]:
        return [self._gradient_of(state) for state in states]

    def _counted(self, state: BucketState) -> slice:
        """Return which of a state's elements this rank counts in norms, and no other rank of the world."""
        is_copy = self._is_copied(state.bucket) and not self.topology.pp.is_first  # the first stage counts it
        if is_copy or not state.kind.parameter_axes.acts(self.topology):
            return slice(0, 0)
        counted, first = overlap(state.owned, state.bucket.counted), state.owned.start
        return slice(counted.start - first, counted.stop - first)

    def _counted_gradients(self) -> list[Tensor]:
        gradients = (self._gradient_of(state)[self._counted(state)] for state in self.states)
        return [gradient for gradient in gradients if gradient.numel()]

    def counted_shards(self) -> Iterator[CountedShard]:
        """Yield the elements that only this rank counts, by parameter."""
        for state in self.states:
            counted, gradient = self._counted(state), self._gradient_of(state)
            for entry in state.entries:
                first = entry.start - state.owned.start
                held = slice(max(first, counted.start), min(entry.end - state.owned.start, counted.stop))
                if held.start < held.stop:
                    used = max(0, first + num_used(entry.spec, self.topology) - held.start)
                    shard = entry.name, state.main[held], gradient[held], state.wide_moments(held)
                    yield CountedShard(*shard, used)

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of the elements that this rank updates, by parameter."""
        for state in self.states:
            gradient = self._gradient_of(state)
            for entry in state.entries:
                yield entry.name, state.parameter_shard(gradient, entry).tensor

    def _is_tied(self, bucket: Bucket) -> bool:
        return self.tied is not None and bucket.entries[0].parameter is self.tied.weight

    def _is_copied(self, bucket: Bucket) -> bool:
        """Return whether another pipeline rank has a copy of the bucket's weight."""
        return self.tied is not None and self.tied.has_other_copy and self._is_tied(bucket)
