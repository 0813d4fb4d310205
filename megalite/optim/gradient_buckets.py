"""Gradient buffers of the buckets, one class per ZeRO stage, and their reduction over data-parallel ranks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalite.distributed.collectives import flat_all_gather, flat_reduce_scatter, start_all_reduce
from megalite.optim.flat_buffers import Bucket, BucketEntry, ReduceHandle
from megalite.tensor_parallel.gemm import MainGrad
from megalite.utils.torch_private import foreach_add_, foreach_copy_, foreach_zero_, storage_number

MESSAGE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by the config's grad_communication_dtype; None is the dtype in which gradients accumulate."""


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulated gradients, main weights and moments for weights of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class GradientBuffer:
    """Gradients of one bucket at ZeRO stage 0: all-reduced, so that every rank has the full sum.

    The buffer is not zeroed between iterations: a parameter's first gradient overwrites the previous
    iteration's gradient, and later ones are added.

    Parameters without weight decay are biases and norms, whose gradients are so small that launching a kernel
    takes longer than its work. Their gradients from autograd are held until the bucket has all of a
    microbatch, and one call accumulates them.

    Attributes:
        owned: range of the bucket that this rank updates, and whose reduced gradient it receives.
        held: range whose gradient this rank holds between microbatches.
        num_expected: number of gradients in each microbatch.
        num_ready: number of gradients that have been accumulated in this iteration.
        stale: names of the parameters whose part of the buffer must be overwritten.
        written: whether a graph of torch.compile has overwritten a parameter's part of the buffer, a bool in
            host memory by name; empty if no graph writes to the buffer.
        unreached: names of the parameters without a gradient in this iteration.
    """

    reduces_each_microbatch = False

    def __init__(self, bucket: Bucket, message_dtype: torch.dtype | None) -> None:
        """Allocate the buffer.

        Args:
            message_dtype: gradients are rounded to it for the reduction, which sums in it; None keeps theirs.
        """
        self.bucket = bucket
        self.replicas = bucket.replicas
        self.dtype = main_dtype(bucket.weight.dtype)
        self.message_dtype = (message_dtype if self.replicas.size > 1 else None) or self.dtype
        self.owned = self.held = slice(0, bucket.size)
        self.num_expected = len(bucket.entries)
        self.num_ready = 0
        self.stale: set[str] = set()
        self.written: dict[str, Tensor] = {}
        self.unreached: set[str] = set()
        self._held: dict[str, tuple[BucketEntry, Tensor]] = {}  # small gradients, not in the buffer yet
        self.buffer: Tensor | None = self._zeros()

    @property
    def full(self) -> Tensor:
        """Return the buffer into which backward accumulates, ``[size]``."""
        assert self.buffer is not None
        return self.buffer

    @property
    def owned_grad(self) -> Tensor:
        """Return the complete gradient of the owned elements, once it is reduced."""
        return self.full[self.owned]

    def begin(self) -> None:
        """Start a new iteration: no parameter has a gradient yet."""
        self.num_ready = 0
        self.stale, self.unreached = self._names(), self._names()
        self._held.clear()
        if self.written:
            foreach_zero_(list(self.written.values()))

    def accumulate(self, entry: BucketEntry) -> None:
        """Count a parameter's new gradient, and move it to the buffer unless its GEMM has already done so."""
        self.num_ready += 1
        self.unreached.discard(entry.name)
        gradient, entry.parameter.grad = entry.parameter.grad, None
        if gradient is not None and entry.spec.decay:
            total, is_stale = self.claim(entry)
            if is_stale:
                total.copy_(gradient)
            else:
                total.add_(gradient)
        elif gradient is not None:
            if entry.name in self._held:
                self._accumulate_held()
            self._held[entry.name] = entry, gradient
        if self.num_ready % self.num_expected == 0:
            self._accumulate_held()

    def accumulated(self, entry: BucketEntry) -> Tensor:
        """Return the gradient that was last accumulated; after the first one of an iteration, only this one.

        It must be read before the buffer is reduced.
        """
        if entry.name in self._held:
            return self._held[entry.name][1]
        return self.bucket.view(self.full, entry)

    def _accumulate_held(self) -> None:
        held, self._held = self._held, {}
        to_copy: dict[Tensor, Tensor] = {}  # gradients by their part of the buffer
        to_add: dict[Tensor, Tensor] = {}
        for entry, gradient in held.values():
            total, is_stale = self.claim(entry)
            (to_copy if is_stale else to_add)[total.view(-1)] = gradient.reshape(-1)
        if to_copy:
            foreach_copy_(list(to_copy), list(to_copy.values()))
        if to_add:
            _add(list(to_add), list(to_add.values()))

    def claim(self, entry: BucketEntry) -> tuple[Tensor, bool]:
        """Return a parameter's part of the buffer, in its shape, and whether to overwrite it or add to it.

        The caller must do so at once: the next call returns False.
        """
        if entry.name in self._held:
            self._accumulate_held()
        is_stale = entry.name in self.stale
        self.stale.discard(entry.name)
        if entry.name in self.written:
            is_stale = not self.written[entry.name].item()
            self.written[entry.name].fill_(True)
        return self.bucket.view(self.full, entry), is_stale

    def complete(self) -> Tensor:
        """Return the full buffer, ``[size]``, with zeros for parameters without a gradient."""
        self._accumulate_held()
        self.stale -= {name for name, is_written in self.written.items() if is_written.item()}
        if self.stale:
            missing = [entry for entry in self.bucket.entries if entry.name in self.stale]
            foreach_zero_([self.bucket.view(self.full, entry) for entry in missing])
            self.stale.clear()
        return self.full

    def start_reduce(self, is_last: bool = True) -> ReduceHandle:
        """Start the sum over the ranks.

        Args:
            is_last: whether this is the iteration's last microbatch.
        """
        message = self.complete().to(self.message_dtype)  # the buffer itself if it has this dtype
        return ReduceHandle(start_all_reduce(message, self.replicas), partial(_copy, message, self.full))

    def all_gather(self) -> Tensor:
        """Return the complete gradient of the whole bucket, ``[size]``; every replica must call it."""
        return self.full

    def _reduce_scatter(
        self, message: Tensor, store: Callable[[Tensor], object], is_last: bool
    ) -> ReduceHandle:
        """Start to sum a full message over the ranks that share the shards; pass this rank's to `store`.

        If the shards are replicated, an all-reduce of the shard over its replicas follows the last sum of an
        iteration.
        """
        result = message[self.owned]  # NCCL and gloo both allow the output to be part of the input
        pending = flat_reduce_scatter(result, message, self.replicas.shard)
        return ReduceHandle(
            pending,
            partial(store, result),
            self._reduce_replicas if is_last and self.replicas.replicate else None,
        )

    def _reduce_replicas(self) -> ReduceHandle:
        assert self.replicas.replicate is not None
        message = self.owned_grad.to(self.message_dtype)
        return ReduceHandle(
            start_all_reduce(message, self.replicas.replicate), partial(_copy, message, self.owned_grad)
        )

    def _names(self) -> set[str]:
        return {entry.name for entry in self.bucket.entries}

    def _zeros(self) -> Tensor:
        return torch.zeros(self.bucket.size, dtype=self.dtype, device=self.bucket.weight.device)


class ReduceScatterBuffer(GradientBuffer):
    """Gradients at ZeRO stage 1: reduce-scattered in place, so each rank has the sum of its shard.

    If groups of ranks replicate the shards, the sum is also all-reduced between the groups.
    """

    def __init__(self, bucket: Bucket, message_dtype: torch.dtype | None) -> None:
        super().__init__(bucket, message_dtype)
        self.owned = bucket.shard

    def start_reduce(self, is_last: bool = True) -> ReduceHandle:
        message = self.complete().to(self.message_dtype)
        return self._reduce_scatter(message, partial(_copy, target=self.owned_grad), is_last)

    def all_gather(self) -> Tensor:
        full = self._zeros()
        flat_all_gather(full, self.owned_grad, self.replicas.shard).wait()
        return full


class ShardedGradientBuffer(ReduceScatterBuffer):
    """Gradients at ZeRO stages 2 and 3: each rank only accumulates its shard over the microbatches.

    The full buffer exists from the first gradient of a microbatch until it is reduce-scattered. Each buffer
    has new memory, so each microbatch overwrites it. Groups of ranks that replicate the shards all-reduce the
    sum of all microbatches once.
    """

    reduces_each_microbatch = True

    def __init__(self, bucket: Bucket, message_dtype: torch.dtype | None) -> None:
        super().__init__(bucket, message_dtype)
        self.held = bucket.shard
        self.buffer = None
        self.stale = self._names()
        shard_size = bucket.shard.stop - bucket.shard.start
        self.shard_sum = torch.zeros(shard_size, dtype=self.dtype, device=bucket.weight.device)
        self.sum_is_stale = False

    @property
    def full(self) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(self.bucket.size, dtype=self.dtype, device=self.shard_sum.device)
            for padding in self.bucket.padding(self.buffer):
                padding.zero_()
        return self.buffer

    @property
    def owned_grad(self) -> Tensor:
        return self.shard_sum

    def begin(self) -> None:
        super().begin()
        self.sum_is_stale = True

    def start_reduce(self, is_last: bool = True) -> ReduceHandle:
        message = self.complete().to(self.message_dtype)
        self.buffer = None  # the message keeps the memory until it has been reduced
        self.stale = self._names()
        return self._reduce_scatter(message, self._accumulate_shard, is_last)

    def _accumulate_shard(self, result: Tensor) -> None:
        if self.sum_is_stale:  # the sum of the previous iteration
            self.shard_sum.copy_(result)
        else:
            self.shard_sum.add_(result)
        self.sum_is_stale = False


def _add(totals: list[Tensor], gradients: list[Tensor]) -> None:
    """Add gradients ``[n]`` to totals of the same or a wider dtype."""
    if totals[0].dtype != gradients[0].dtype:
        # With two dtypes, a GPU copies lists of tensors in one kernel, but adds them one by one.
        sizes = [total.numel() for total in totals]
        widened = list(totals[0].new_empty(sum(sizes)).split(sizes))
        foreach_copy_(widened, gradients)
        gradients = widened
    foreach_add_(totals, gradients)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a reduced message into the buffer, unless it already is the buffer's memory."""
    if storage_number(source.untyped_storage()) != storage_number(target.untyped_storage()):
        target.copy_(source)


GRADIENT_BUFFERS: dict[int, type[GradientBuffer]] = {
    0: GradientBuffer,
    1: ReduceScatterBuffer,
    2: ShardedGradientBuffer,
    3: ShardedGradientBuffer,
}
"""Gradient classes by ZeRO stage."""


MAX_IN_FLIGHT = 1
"""Largest number of reductions in flight at ZeRO stages 2 and 3, where each keeps a full buffer in memory.

With more, steps that follow a bucket's last reduction could precede the sum of its previous microbatch.
"""


def _call_if_alive(hook: weakref.ref[Callable[[Tensor], None]], gradient: Tensor) -> None:
    if (alive := hook()) is not None:
        alive(gradient)


class GradReducer:
    """Reduction of gradients, which starts as soon as backward has filled a bucket.

    A hook on each parameter counts the gradients of its bucket. All ranks start the buckets of a group in the
    same order, whatever the order in which backward fills them: otherwise ranks would sum different buckets.
    A bucket is reduced once per iteration, after the last microbatch, or once per microbatch at ZeRO stages 2
    and 3. There, an early or late gradient may be part of the neighbouring reduction, which does not change
    the sums.

    Args:
        groups: buffers in the order in which backward fills them, in one group; or one group for each model
            chunk, if no buffer has parameters of several chunks.
        overlap: reduce while backward runs instead of after it.
        tied_buffer: buffer of a tied embedding that two stages use. It is reduced last, in `finish`:
            another rank's part must be added first, or, with both stages on this rank, the weight has two
            gradients per microbatch, which the counts of the other buffers do not expect.
        sum_tied_copies: called on the full `tied_buffer`, ``[size]``, before it is reduced, if two ranks
            each have a copy of the embedding.
        graphs_add: graphs of torch.compile write and add to the buffers that stay in place.
        on_complete: called for each buffer once its gradient is complete, on the CUDA stream that has it,
            during backward; also called on a single rank.

    Attributes:
        on_filled: called for each buffer when backward has filled it in a microbatch; may be None.
        on_gradient: called for each parameter when it has a new gradient, before any reduction; may be None.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[GradientBuffer]],
        overlap: bool,
        tied_buffer: GradientBuffer | None = None,
        sum_tied_copies: Callable[[Tensor], None] | None = None,
        graphs_add: bool = False,
        on_complete: Callable[[GradientBuffer], object] | None = None,
    ) -> None:
        self.groups = groups
        self.buffers = [buffer for group in groups for buffer in group]
        self.tied_buffer = tied_buffer
        self._all_buffers = [*self.buffers, *([] if tied_buffer is None else [tied_buffer])]
        axes = [buffer.replicas for buffer in self._all_buffers]
        has_replicas = any(axis.size > 1 for axis in axes)
        self.overlap = overlap or not has_replicas
        self.sum_tied_copies = sum_tied_copies
        for buffer in self._all_buffers if graphs_add else ():
            if not buffer.reduces_each_microbatch:
                names = (entry.name for entry in buffer.bucket.entries)
                buffer.written = {name: torch.zeros((), dtype=torch.bool, device="cpu") for name in names}
        self.on_complete = on_complete
        self.on_filled: Callable[[GradientBuffer], object] | None = None
        self.on_gradient: Callable[[GradientBuffer, BucketEntry], object] | None = None
        self.reduces = has_replicas or on_complete is not None
        self.num_microbatches = 0
        # By group, reductions to start: the buffer, and the number of gradients that it must have.
        self._waiting: list[deque[tuple[GradientBuffer, int]]] = [deque() for _ in groups]
        self._in_flight: deque[ReduceHandle] = deque()
        # Reductions that another step must follow: an all-reduce between groups of ranks, or `on_complete`.
        is_on_gpu = any(buffer.bucket.weight.device.type == "cuda" for buffer in self.buffers)
        is_followed = any(axis.replicate for axis in axes) or on_complete is not None
        self._stream = torch.cuda.Stream() if is_on_gpu and is_followed else None
        grouped = zip(self._waiting, groups, strict=True)
        self._waiting_of = {buffer: waiting for waiting, group in grouped for buffer in group}
        # What each parameter calls when it has a new gradient.
        self._on_gradients = [
            (buffer, entry, partial(self._on_gradient, buffer, entry))
            for buffer in self._all_buffers
            for entry in buffer.bucket.entries
        ]
        for _, entry, hook in self._on_gradients:
            # A strong reference would be part of a cycle that Python's garbage collector cannot see.
            entry.parameter.register_post_accumulate_grad_hook(partial(_call_if_alive, weakref.ref(hook)))

    def main_grads(self) -> dict[nn.Parameter, MainGrad]:
        """Return each parameter's `main_grad`, for linear layers that add to the buffers without autograd."""
        return {
            entry.parameter: MainGrad(
                partial(buffer.claim, entry),
                partial(hook, entry.parameter),
                (buffer.bucket.view(buffer.full, entry), buffer.written[entry.name])
                if buffer.written
                else None,
            )
            for buffer, entry, hook in self._on_gradients
        }

    def begin(self, num_microbatches: int) -> None:
        """Start a new iteration, with one gradient per parameter and microbatch."""
        self.num_microbatches = num_microbatches
        for buffer in self._all_buffers:
            buffer.begin()
        for waiting, group in zip(self._waiting, self.groups, strict=True):
            waiting.clear()
            for number in range(1, num_microbatches + 1) if self.reduces else ():
                waiting.extend(
                    (buffer, number * buffer.num_expected)
                    for buffer in group
                    if buffer.reduces_each_microbatch or number == num_microbatches
                )

    def finish(self) -> None:
        """Start the remaining reductions, because parameters may have had no gradient, and wait for all."""
        if not self.reduces:
            for buffer in self.buffers:
                buffer.complete()
        for waiting in self._waiting:
            while waiting:
                self._start_next(waiting)
        if self.tied_buffer is not None:
            full = self.tied_buffer.complete()
            if self.sum_tied_copies is not None:
                self.sum_tied_copies(full)
            if self.reduces:
                self._start(self.tied_buffer, is_last=True)
        self._wait(0)

    def wait_for_started(self) -> None:
        """Wait for the reductions that have started."""
        self._wait(0)

    def _on_gradient(self, buffer: GradientBuffer, entry: BucketEntry, _: Tensor) -> None:
        buffer.accumulate(entry)
        if self.on_gradient is not None:
            self.on_gradient(buffer, entry)
        if buffer is self.tied_buffer:
            return  # `finish` reduces it
        assert buffer.num_ready <= buffer.num_expected * self.num_microbatches, (
            "more backward passes than passed to begin(): the bucket has already been reduced"
        )
        if self.overlap or buffer.reduces_each_microbatch:
            waiting = self._waiting_of[buffer]
            while waiting and waiting[0][0].num_ready >= waiting[0][1]:
                self._start_next(waiting)

    def _start_next(self, waiting: deque[tuple[GradientBuffer, int]]) -> None:
        buffer, number = waiting.popleft()
        if self.on_filled is not None:
            self.on_filled(buffer)
        self._start(buffer, number == self.num_microbatches * buffer.num_expected)
        if buffer.reduces_each_microbatch:
            self._wait(MAX_IN_FLIGHT if self.overlap else 0)

    def _start(self, buffer: GradientBuffer, is_last: bool) -> None:
        handle = buffer.start_reduce(is_last)
        if is_last and self.on_complete is not None:
            handle.on_complete = partial(self.on_complete, buffer)
        if self._in_flight:  # its first collective has had the time of one bucket to complete
            self._in_flight[-1].advance(self._stream)
        self._in_flight.append(handle)

    def _wait(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            self._in_flight.popleft().wait()
