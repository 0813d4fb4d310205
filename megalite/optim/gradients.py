"""Where a bucket's gradients lie, and how data-parallel ranks sum them: one class for each ZeRO stage.

ZeRO (Rajbhandari et al. 2020) names its stages by what the ranks share out: 1 the optimizer's state, 2 the
gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.optim.flat import Bucket, Slot
from megalite.parallel.collectives import Pending, flat_gather, flat_scatter_sum, start_all_reduce
from megalite.topology import Axis

ACCUMULATION_DTYPES = {torch.float64: torch.float64}
"""What gradients add up in, by the weights' dtype; all others add up in fp32."""

MESSAGE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the config's grad_communication_dtype; None is the dtype that gradients add up in."""


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the gradients' sums, the main weights and the moments of weights of `dtype`."""
    return ACCUMULATION_DTYPES.get(dtype, torch.float32)


class Message(NamedTuple):
    """A bucket's gradients on their way; `arrive` puts the sum where it belongs."""

    sent: Pending
    arrive: Callable[[], object]

    def wait(self) -> None:
        self.sent.wait()
        self.arrive()


class WholeGradients:
    """Stage 0: every rank has the whole bucket's gradients, of its own batch and then of all.

    Where weights have the gradients' dtype every ``.grad`` is a view of the buffer, and autograd adds to it
    in place; otherwise `take` adds a parameter's gradient and frees it.

    Attributes:
        owned: the elements of the bucket whose sum this rank gets, and which it updates.
        num_arrived: gradients that have come in this iteration.
    """

    leaves_each_microbatch = False

    def __init__(self, bucket: Bucket, dp: Axis, message_dtype: torch.dtype | None) -> None:
        """Makes the buffers.

        Args:
            message_dtype: gradients are rounded to it for their way between ranks, and summed in it; None
                sends them as they are.
        """
        self.bucket = bucket
        self.dp = dp
        self.dtype = main_dtype(bucket.weight.dtype)
        self.message_dtype = message_dtype or self.dtype
        self.owned = slice(0, bucket.size)
        self.num_arrived = 0
        self.buffer: Tensor | None = self._zeros()
        self.has_views = self.dtype == bucket.weight.dtype
        if self.has_views:
            for slot in bucket.slots:
                slot.parameter.grad = self.sum_of(slot)

    @property
    def whole(self) -> Tensor:
        """The buffer that backward fills, ``[size]``."""
        if self.buffer is None:
            self.buffer = self._zeros()
        return self.buffer

    @property
    def summed(self) -> Tensor:
        """The complete gradient of the owned elements, once it has arrived."""
        return self.whole[self.owned]

    @property
    def shard(self) -> Tensor:
        """The complete gradient of this rank's shard: the ranks' shards make up the bucket."""
        return self.whole[self.bucket.shard]

    def begin(self) -> None:
        """Empties the gradients."""
        self.num_arrived = 0
        self.whole.zero_()

    def take(self, slot: Slot) -> None:
        """Counts a parameter's new gradient, and adds it unless autograd or the product that made it has."""
        self.num_arrived += 1
        if self.has_views or slot.parameter.grad is None:
            return
        self.sum_of(slot).add_(slot.parameter.grad)
        slot.parameter.grad = None

    def sum_of(self, slot: Slot) -> Tensor:
        """Where a parameter's gradients add up, in its shape."""
        return self.bucket.view(self.whole, slot)

    def start(self) -> Message:
        """Starts the sum over the ranks."""
        message = self.whole.to(self.message_dtype)  # the buffer itself where it has that dtype
        return Message(start_all_reduce(message, self.dp), partial(_put, message, self.whole))

    def gathered(self) -> Tensor:
        """The complete gradient of the whole bucket, ``[size]``; every rank of dp calls it."""
        return self.whole

    def _zeros(self) -> Tensor:
        return torch.zeros(self.bucket.size, dtype=self.dtype, device=self.bucket.weight.device)


class ScatteredGradients(WholeGradients):
    """Stage 1: backward fills the whole buffer; of the sum each rank gets its shard alone, in place."""

    def __init__(self, bucket: Bucket, dp: Axis, message_dtype: torch.dtype | None) -> None:
        super().__init__(bucket, dp, message_dtype)
        self.owned = bucket.shard

    def start(self) -> Message:
        message = self.whole.to(self.message_dtype)
        result = message[self.owned]  # both NCCL and gloo scatter in place
        return Message(flat_scatter_sum(result, message, self.dp), partial(_put, result, self.summed))

    def gathered(self) -> Tensor:
        whole = torch.empty_like(self.whole)
        flat_gather(whole, self.summed, self.dp).wait()
        return whole


class ShardGradients(WholeGradients):
    """Stage 2: between microbatches a rank keeps its shard of the sums alone.

    The whole buffer exists from the first gradient of a microbatch until its sum has arrived.
    """

    leaves_each_microbatch = True

    def __init__(self, bucket: Bucket, dp: Axis, message_dtype: torch.dtype | None) -> None:
        super().__init__(bucket, dp, message_dtype)
        self.owned = bucket.shard
        self.has_views = False
        self.buffer = None
        for slot in bucket.slots:
            slot.parameter.grad = None
        shard_size = bucket.shard.stop - bucket.shard.start
        self.sums = torch.zeros(shard_size, dtype=self.dtype, device=bucket.weight.device)

    @property
    def summed(self) -> Tensor:
        return self.sums

    @property
    def shard(self) -> Tensor:
        return self.sums

    def begin(self) -> None:
        self.num_arrived = 0
        self.sums.zero_()

    def start(self) -> Message:
        message = self.whole.to(self.message_dtype)
        self.buffer = None  # the message keeps the memory until it has arrived
        result = message[self.owned]
        return Message(flat_scatter_sum(result, message, self.dp), partial(self.sums.add_, result))

    def gathered(self) -> Tensor:
        whole = self._zeros()
        flat_gather(whole, self.sums, self.dp).wait()
        return whole


def _put(source: Tensor, target: Tensor) -> None:
    """Copies a message into its buffer, unless it was sent from there."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


GRADIENTS: dict[int, type[WholeGradients]] = {0: WholeGradients, 1: ScatteredGradients, 2: ShardGradients}
"""By ZeRO stage."""
