"""Gradient buffers of the buckets, one class per ZeRO stage, and their reduction over data-parallel ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalite.distributed.collectives import Pending, flat_all_gather, flat_reduce_scatter, start_all_reduce
from megalite.distributed.topology import Axis
from megalite.optim.flat_buffers import Bucket, BucketEntry
from megalite.tensor_parallel.weight_gradient_store import MainGrad
from megalite.torch_private import foreach_zero_

MESSAGE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by the config's grad_communication_dtype; None is the dtype in which gradients accumulate."""


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulated gradients, main weights and moments for weights of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ReduceHandle:
    """An in-flight reduction of a bucket; `wait` also stores its result.

    Args:
        store_result: called once the collective is complete.
        start_next: starts the collective that must follow it.

    Attributes:
        on_complete: called once the result is stored, on the stream that has it; may be None.
    """

    def __init__(
        self,
        pending: Pending,
        store_result: Callable[[], object],
        start_next: Callable[[], ReduceHandle] | None = None,
    ) -> None:
        self._pending = pending
        self._store_result = store_result
        self._start_next = start_next
        self._first: object = None
        self._is_complete = False
        self._completed: torch.cuda.Event | None = None
        self.on_complete: Callable[[], object] | None = None

    def advance(self, stream: torch.cuda.Stream | None) -> None:
        """Run the work after the first collective while backward runs, if there is any.

        Args:
            stream: on a GPU, the stream that waits, so that backward does not; None on a CPU, where the host
                waits.
        """
        if self._is_complete or (self._start_next is None and self.on_complete is None):
            return
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._complete()
                self._completed = stream.record_event()  # the tensors are kept until `wait`
        elif self.on_complete is not None:
            self._complete()
        else:
            self._start_following()

    def wait(self) -> None:
        if not self._is_complete:
            self._complete()
        elif self._completed is not None:
            torch.cuda.current_stream().wait_event(self._completed)

    def _complete(self) -> None:
        self._start_following()
        self._pending.wait()
        self._store_result()
        self._is_complete = True
        if self.on_complete is not None:
            self.on_complete()

    def _start_following(self) -> None:
        if self._start_next is None:
            return
        self._pending.wait()
        self._store_result()
        following = self._start_next()
        self._first = self._store_result  # keeps the tensors alive: a stream may still use them
        self._pending, self._store_result = following._pending, following._store_result
        self._start_next = None


class GradientBuffer:
    """The gradients of one bucket at ZeRO stage 0: all-reduced, so that every rank has the full sum.

    The buffer is not zeroed between iterations: a parameter's first gradient overwrites the previous
    iteration's gradient, and later ones are added.

    Attributes:
        owned: range of the bucket that this rank updates, and whose reduced gradient it receives.
        held: range whose gradient this rank holds between microbatches.
        num_ready: number of gradients that have been accumulated in this iteration.
        stale: names of the parameters whose part of the buffer must be overwritten.
        unreached: names of the parameters without a gradient in this iteration.
    """

    reduces_each_microbatch = False

    def __init__(self, bucket: Bucket, dp: Axis, message_dtype: torch.dtype | None) -> None:
        """Allocate the buffer.

        Args:
            message_dtype: gradients are rounded to it for the reduction, which sums in it; None keeps theirs.
        """
        self.bucket = bucket
        self.dp = dp
        self.dtype = main_dtype(bucket.weight.dtype)
        self.message_dtype = (message_dtype if dp.size > 1 else None) or self.dtype
        self.owned = self.held = slice(0, bucket.size)
        self.num_ready = 0
        self.stale: set[str] = set()
        self.unreached: set[str] = set()
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

    @property
    def counted_grad(self) -> Tensor:
        """Return the complete gradient that this rank counts in norms; together, ranks count the bucket."""
        counted = self.bucket.counted
        return self.owned_grad[counted.start - self.owned.start : counted.stop - self.owned.start]

    def begin(self) -> None:
        """Start a new iteration: no parameter has a gradient yet."""
        self.num_ready = 0
        self.stale, self.unreached = self._names(), self._names()

    def accumulate(self, entry: BucketEntry) -> None:
        """Count a parameter's new gradient, and move it to the buffer unless its GEMM has already done so."""
        self.num_ready += 1
        self.unreached.discard(entry.name)
        gradient = entry.parameter.grad
        if gradient is None:
            return
        total, is_stale = self.claim(entry)
        if is_stale:
            total.copy_(gradient)
        else:
            total.add_(gradient)
        entry.parameter.grad = None

    def claim(self, entry: BucketEntry) -> tuple[Tensor, bool]:
        """Return a parameter's part of the buffer, in its shape, and whether to overwrite it or add to it.

        The caller must do so at once: the next call returns False.
        """
        is_stale = entry.name in self.stale
        self.stale.discard(entry.name)
        return self.bucket.view(self.full, entry), is_stale

    def complete(self) -> Tensor:
        """Return the full buffer, ``[size]``, with zeros for parameters without a gradient."""
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
        return ReduceHandle(start_all_reduce(message, self.dp), partial(_copy, message, self.full))

    def all_gather(self) -> Tensor:
        """Return the complete gradient of the whole bucket, ``[size]``; every rank of dp must call it."""
        return self.full

    def _reduce_scatter(
        self, message: Tensor, store: Callable[[Tensor], object], is_last: bool
    ) -> ReduceHandle:
        """Start to sum a full message over the ranks that share the shards; pass this rank's to `store`.

        If the shards are replicated, an all-reduce of the shard over its replicas follows the last sum of an
        iteration.
        """
        result = message[self.owned]  # NCCL and gloo both allow the output to be part of the input
        pending = flat_reduce_scatter(result, message, self.dp.shard)
        return ReduceHandle(
            pending, partial(store, result), self._reduce_replicas if is_last and self.dp.replicate else None
        )

    def _reduce_replicas(self) -> ReduceHandle:
        assert self.dp.replicate is not None
        message = self.owned_grad.to(self.message_dtype)
        return ReduceHandle(
            start_all_reduce(message, self.dp.replicate), partial(_copy, message, self.owned_grad)
        )

    def _names(self) -> set[str]:
        return {entry.name for entry in self.bucket.entries}

    def _zeros(self) -> Tensor:
        return torch.zeros(self.bucket.size, dtype=self.dtype, device=self.bucket.weight.device)


class ReduceScatterBuffer(GradientBuffer):
    """The gradients at ZeRO stage 1: reduce-scattered in place, so that each rank has the sum of its shard.

    If groups of ranks replicate the shards, the sum is also all-reduced between the groups.
    """

    def __init__(self, bucket: Bucket, dp: Axis, message_dtype: torch.dtype | None) -> None:
        super().__init__(bucket, dp, message_dtype)
        self.owned = bucket.shard

    def start_reduce(self, is_last: bool = True) -> ReduceHandle:
        message = self.complete().to(self.message_dtype)
        return self._reduce_scatter(message, partial(_copy, target=self.owned_grad), is_last)

    def all_gather(self) -> Tensor:
        full = torch.empty_like(self.full)
        flat_all_gather(full, self.owned_grad, self.dp.shard).wait()
        return full


class ShardedGradientBuffer(GradientBuffer):
    """The gradients at ZeRO stage 2: each rank only accumulates its shard over the microbatches.

    The full buffer exists from the first gradient of a microbatch until it is reduce-scattered. Each buffer
    has new memory, so each microbatch overwrites it. Groups of ranks that replicate the shards all-reduce the
    sum of all microbatches once.
    """

    reduces_each_microbatch = True

    def __init__(self, bucket: Bucket, dp: Axis, message_dtype: torch.dtype | None) -> None:
        super().__init__(bucket, dp, message_dtype)
        self.owned = self.held = bucket.shard
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

    def all_gather(self) -> Tensor:
        full = self._zeros()
        flat_all_gather(full, self.shard_sum, self.dp.shard).wait()
        return full


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a reduced message into the buffer, unless it already is the buffer's memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


GRADIENT_BUFFERS: dict[int, type[GradientBuffer]] = {
    0: GradientBuffer,
    1: ReduceScatterBuffer,
    2: ShardedGradientBuffer,
}
"""Gradient classes by ZeRO stage."""


MAX_IN_FLIGHT = 2
"""Largest number of reductions in flight at ZeRO stage 2, where each keeps a full buffer in memory."""


class GradReducer:
    """Starts the reduction of a bucket as soon as backward has filled it.

    A hook on each parameter counts the gradients of its bucket. All ranks start buckets in the same order,
    whatever the order in which backward fills them: otherwise ranks would sum different buckets. A bucket is
    reduced once per iteration, after the last microbatch, or once per microbatch at ZeRO stage 2. There, an
    early or late gradient may be part of the neighbouring reduction, which does not change the sums.

    Args:
        buffers: buffers in the order in which backward fills them.
        overlap: reduce while backward runs instead of after it.
        tied_buffer: buffer of a tied embedding that two stages use. It is reduced last, in `finish`:
            another rank's part must be added first, or, with both stages on this rank, the weight has two
            gradients per microbatch, which the counts of the other buffers do not expect.
        sum_tied_copies: called on the full `tied_buffer`, ``[size]``, before it is reduced, if two ranks
            each have a copy of the embedding.
        graphs_add: graphs of torch.compile add to the buffers that stay in place. They cannot choose to
            overwrite, so these buffers are zeroed when an iteration begins.
        on_complete: called for each buffer once its gradient is complete, on the CUDA stream that has it,
            during backward; also called on a single rank.
    """

    def __init__(
        self,
        buffers: Sequence[GradientBuffer],
        dp: Axis,
        overlap: bool,
        tied_buffer: GradientBuffer | None = None,
        sum_tied_copies: Callable[[Tensor], None] | None = None,
        graphs_add: bool = False,
        on_complete: Callable[[GradientBuffer], object] | None = None,
    ) -> None:
        self.buffers = buffers
        self.dp = dp
        self.overlap = overlap or dp.size == 1
        self.tied_buffer = tied_buffer
        self.sum_tied_copies = sum_tied_copies
        self.graphs_add = graphs_add
        self.on_complete = on_complete
        self.reduces = dp.size > 1 or on_complete is not None
        self.num_microbatches = 0
        # Reductions to start: the buffer, and the number of gradients that it must have.
        self._waiting: deque[tuple[GradientBuffer, int]] = deque()
        self._in_flight: deque[ReduceHandle] = deque()
        # Reductions that another step must follow: an all-reduce between groups of ranks, or `on_complete`.
        is_on_gpu = any(buffer.bucket.weight.device.type == "cuda" for buffer in buffers)
        is_followed = dp.replicate is not None or on_complete is not None
        self._stream = torch.cuda.Stream() if is_on_gpu and is_followed else None
        for _, entry, hook in self._hooks():
            entry.parameter.register_post_accumulate_grad_hook(hook)

    def main_grads(self) -> dict[nn.Parameter, MainGrad]:
        """Return each parameter's `main_grad`, for linear layers that add to the buffers without autograd."""
        return {
            entry.parameter: MainGrad(
                partial(buffer.claim, entry),
                partial(hook, entry.parameter),
                buffer.bucket.view(buffer.full, entry) if self._is_zeroed(buffer) else None,
            )
            for buffer, entry, hook in self._hooks()
        }

    def begin(self, num_microbatches: int) -> None:
        """Start a new iteration, with one gradient per parameter and microbatch."""
        self.num_microbatches = num_microbatches
        for buffer in self._all_buffers():
            buffer.begin()
            if self._is_zeroed(buffer):
                buffer.complete()
        self._waiting.clear()
        if self.reduces:
            for number in range(1, num_microbatches + 1):
                self._waiting.extend(
                    (buffer, number * len(buffer.bucket.entries))
                    for buffer in self.buffers
                    if buffer.reduces_each_microbatch or number == num_microbatches
                )

    def finish(self) -> None:
        """Start the remaining reductions, because parameters may have had no gradient, and wait for all."""
        if not self.reduces:
            for buffer in self.buffers:
                buffer.complete()
        while self._waiting:
            self._start_next()
        if self.tied_buffer is not None:
            full = self.tied_buffer.complete()
            if self.sum_tied_copies is not None:
                self.sum_tied_copies(full)
            if self.reduces:
                self._start(self.tied_buffer, is_last=True)
        self._wait(0)

    def _is_zeroed(self, buffer: GradientBuffer) -> bool:
        return self.graphs_add and not buffer.reduces_each_microbatch

    def _all_buffers(self) -> list[GradientBuffer]:
        return [*self.buffers, *([] if self.tied_buffer is None else [self.tied_buffer])]

    def _hooks(self) -> Iterator[tuple[GradientBuffer, BucketEntry, Callable[[Tensor], None]]]:
        """Yield each parameter's function to call when it has a new gradient."""
        for buffer in self._all_buffers():
            for entry in buffer.bucket.entries:
                yield buffer, entry, partial(self._on_gradient, buffer, entry)

    def _on_gradient(self, buffer: GradientBuffer, entry: BucketEntry, _: Tensor) -> None:
        buffer.accumulate(entry)
        if buffer is self.tied_buffer:
            return  # `finish` reduces it
        assert buffer.num_ready <= len(buffer.bucket.entries) * self.num_microbatches, (
            "more backward passes than passed to begin(): the bucket has already been reduced"
        )
        if self.overlap or buffer.reduces_each_microbatch:
            while self._waiting and self._waiting[0][0].num_ready >= self._waiting[0][1]:
                self._start_next()

    def _start_next(self) -> None:
        buffer, number = self._waiting.popleft()
        self._start(buffer, number == self.num_microbatches * len(buffer.bucket.entries))
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
