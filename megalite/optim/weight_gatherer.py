"""Complete updated weights before or during the next forward: the host's update, and the all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from megalite.distributed.collectives import Pending, flat_all_gather
from megalite.optim.flat_buffers import Bucket

ForwardUnit = tuple[nn.Module, Sequence[nn.Parameter]]
"""FSDP unit: a module, and the parameters that forward uses from its call to the next unit's call."""


class WeightGatherer:
    """All-gather of each bucket's weights from the ranks that own its shards (ZeRO stages 0 to 2).

    With units, the all-gather overlaps the next forward: buckets are started in the order in which forward
    first uses them, and each unit's call waits for its own buckets. Without units, `start` waits for all.

    Args:
        gathers: gather each bucket from the ranks that own its shards; False if each rank owns whole buckets
            and only waits for updates.
        one_ahead: start each bucket only when forward waits for the previous one.
        wait_for_update: waits until a bucket is updated, for concurrent updates on the host; buckets are
            then started as with `one_ahead`. None if `start` is called after the update.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gathers: bool,
        units: Sequence[ForwardUnit] = (),
        one_ahead: bool = False,
        wait_for_update: Callable[[Bucket], object] | None = None,
    ) -> None:
        self.gathers = gathers
        self.overlap = bool(units)
        self.one_ahead = one_ahead
        self.wait_for_update = wait_for_update
        self._in_flight: dict[Bucket, Pending] = {}
        bucket_of = {entry.parameter: bucket for bucket in buckets for entry in bucket.entries}
        needs = [dict.fromkeys(bucket_of[parameter] for parameter in parameters) for _, parameters in units]
        used = dict.fromkeys(bucket for needed in needs for bucket in needed)
        assert not units or len(used) == len(buckets), "a bucket that no unit waits for"
        self.buckets = list(used) if units else list(buckets)
        self._position = {bucket: position for position, bucket in enumerate(self.buckets)}
        self._num_started = len(self.buckets)  # before the first update, weights are complete
        for (module, _), needed in zip(units, needs, strict=True):
            module.register_forward_pre_hook(partial(self._wait, list(needed)))

    def start(self) -> None:
        """Start to all-gather the buckets from up-to-date shards."""
        self._num_started = 0
        if not self.overlap:
            self._start_until(len(self.buckets))
            self.finish()
        elif self.wait_for_update is None:
            self._start_until(1 if self.one_ahead else len(self.buckets))

    def finish(self) -> None:
        """Wait for every bucket, before weights are read outside of a unit's forward."""
        self._wait(self.buckets)

    def free(self) -> None:
        """Do nothing: weights stay full."""

    def _start_until(self, end: int) -> None:
        for bucket in self.buckets[self._num_started : end]:
            if self.wait_for_update is not None:
                self.wait_for_update(bucket)
            if self.gathers:
                self._in_flight[bucket] = flat_all_gather(
                    bucket.weight, bucket.weight[bucket.shard], bucket.replicas.shard, of="weights"
                )
        self._num_started = max(self._num_started, end)

    def _wait(self, buckets: Sequence[Bucket], *_: Any) -> None:
        for bucket in buckets:
            self._start_until(self._position[bucket] + 2)  # this bucket and the one after it
            if pending := self._in_flight.pop(bucket, None):
                pending.wait()
