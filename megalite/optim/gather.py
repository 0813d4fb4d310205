"""Puts the weights together again that data-parallel ranks have updated in parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from megalite.optim.flat import Bucket
from megalite.parallel.collectives import Pending, flat_gather
from megalite.topology import Axis


class Unit(NamedTuple):
    """A module, and the parameters that forward uses from its call to the next unit's."""

    module: nn.Module
    parameters: Sequence[nn.Parameter]


class WeightGatherer:
    """Gathers each bucket's weights from the ranks that own its shards.

    With units, the gathering runs under the next forward: buckets leave in the order in which forward uses
    them first, and each unit's call waits for its own. Without, it is complete when `start` returns.
    """

    def __init__(self, buckets: Sequence[Bucket], dp: Axis, units: Sequence[Unit] = ()) -> None:
        self.dp = dp
        self.overlap = bool(units)
        self._in_flight: dict[Bucket, Pending] = {}
        bucket_of = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        needs = [[bucket_of[parameter] for parameter in unit.parameters] for unit in units]
        used = dict.fromkeys(bucket for needed in needs for bucket in needed)
        assert not units or len(used) == len(buckets), "a bucket that no unit waits for"
        self.buckets = list(used) if units else list(buckets)
        for unit, needed in zip(units, needs, strict=True):
            unit.module.register_forward_pre_hook(partial(self._wait, list(dict.fromkeys(needed))))

    def start(self) -> None:
        """Starts to gather every bucket, each rank's shard of which is up to date."""
        for bucket in self.buckets:
            self._in_flight[bucket] = flat_gather(bucket.weight, bucket.weight[bucket.shard], self.dp)
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        """Waits for every bucket: to read weights anywhere but in a unit's forward."""
        self._wait(list(self._in_flight))

    def _wait(self, buckets: Sequence[Bucket], *_: Any) -> None:
        for bucket in buckets:
            if sent := self._in_flight.pop(bucket, None):
                sent.wait()
