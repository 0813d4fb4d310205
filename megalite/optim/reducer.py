"""Sums gradients over the data-parallel ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megalite.optim.flat import FlatGroup, Slot
from megalite.topology import Axis


@dataclass
class Bucket:
    """A stretch of a flat gradient that is reduced in one message.

    Attributes:
        pending: gradients still to come in this iteration, over its parameters and the microbatches.
    """

    grad: Tensor
    slots: Sequence[Slot]
    pending: int = 0
    work: dist.Work | None = None


class GradReducer:
    """Starts a bucket's all-reduce as soon as the last microbatch has filled it.

    Each parameter's hook counts down its bucket. Buckets start in one fixed order on every rank, whatever the
    order in which they fill: ranks that start collectives in different orders add up different buckets.

    Args:
        bucket_size: elements from which on a bucket is full.
    """

    def __init__(self, groups: Sequence[FlatGroup], dp: Axis, bucket_size: int) -> None:
        self.dp = dp
        self.buckets = (
            [bucket for group in groups for bucket in _buckets(group, bucket_size)] if dp.size > 1 else []
        )
        self.num_started = 0
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket: self._count(bucket)
                )

    def begin(self, num_microbatches: int) -> None:
        """Expects every parameter's gradient from each of `num_microbatches` backward passes."""
        self.num_started = 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots) * num_microbatches

    def finish(self) -> None:
        """Starts what has not started (parameters that had no gradient) and waits for all of it."""
        self._start(self.buckets[self.num_started :])
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None

    def _count(self, bucket: Bucket) -> None:
        assert bucket.pending > 0, "more backward passes than begin() was told: the bucket has already left"
        bucket.pending -= 1
        if bucket.pending == 0:
            self._start(self._filled())

    def _filled(self) -> list[Bucket]:
        """Buckets that may start now: the next ones in order, up to one that still waits for gradients."""
        waiting = self.buckets[self.num_started :]
        count = next((i for i, bucket in enumerate(waiting) if bucket.pending > 0), len(waiting))
        return waiting[:count]

    def _start(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.work = dist.all_reduce(bucket.grad, group=self.dp.group, async_op=True)
            self.num_started += 1


def _buckets(group: FlatGroup, bucket_size: int) -> Iterator[Bucket]:
    slots: list[Slot] = []
    for slot in group.slots:
        slots.append(slot)
        if slot.end - slots[0].start >= bucket_size or slot is group.slots[-1]:
            yield Bucket(group.grad[slots[0].start : slot.end], slots)
            slots = []
