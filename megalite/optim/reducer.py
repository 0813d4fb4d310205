"""Sums gradients over the data-parallel ranks while backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from megalite.optim.flat import Slot
from megalite.optim.gradients import Message, WholeGradients
from megalite.parallel.weight_gradient_store import MainGrad
from megalite.topology import Axis

MAX_IN_FLIGHT = 2
"""Buckets on their way at a time where each has a buffer of its own: a bound on the memory they keep."""


class GradReducer:
    """Starts a bucket's reduction as soon as backward has filled it.

    Each parameter's hook counts its bucket's gradients. Buckets start in one fixed order on every rank,
    whatever the order in which they fill: ranks that start collectives in different orders add up different
    buckets. A bucket leaves once an iteration, filled by the last microbatch, or, where gradients are kept
    as shards, once a microbatch: then a gradient that comes early or late is in the one before or after,
    which changes no sum.

    Args:
        gradients: of the buckets, in the order in which backward fills them.
        overlap: reduce under backward; else after it.
        last: gradients that leave after all others, however many passes they come from.
        complete: called on those, ``[size]``, before they leave.
    """

    def __init__(
        self,
        gradients: Sequence[WholeGradients],
        dp: Axis,
        overlap: bool,
        last: WholeGradients | None = None,
        complete: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.gradients = gradients
        self.dp = dp
        self.overlap = overlap
        self.last = last
        self.complete = complete
        self.num_microbatches = 0
        # What is still to leave: a bucket, and how many gradients it waits for.
        self._waiting: deque[tuple[WholeGradients, int]] = deque()
        self._in_flight: deque[Message] = deque()
        for each, slot, take in self._takers():
            if each is last or dp.size > 1 or not each.has_views:
                slot.parameter.register_post_accumulate_grad_hook(take)

    def main_grads(self) -> dict[nn.Parameter, MainGrad]:
        """Return each parameter's `main_grad`, for linear layers that add to the buffers without autograd."""
        return {
            slot.parameter: MainGrad(partial(each.sum_of, slot), partial(take, slot.parameter))
            for each, slot, take in self._takers()
        }

    def begin(self, num_microbatches: int) -> None:
        """Empties the gradients; expects each parameter's from each of `num_microbatches` backward passes."""
        self.num_microbatches = num_microbatches
        for each in self.gradients if self.last is None else (*self.gradients, self.last):
            each.begin()
        self._waiting.clear()
        if self.dp.size > 1:
            for number in range(1, num_microbatches + 1):
                self._waiting.extend(
                    (each, number * len(each.bucket.slots))
                    for each in self.gradients
                    if each.leaves_each_microbatch or number == num_microbatches
                )

    def finish(self) -> None:
        """Starts what has not started (parameters may have had no gradient) and waits for all of it."""
        while self._waiting:
            self._start_next()
        if self.last is not None:
            if self.complete is not None:
                self.complete(self.last.whole)
            if self.dp.size > 1:
                self._in_flight.append(self.last.start())
        self._wait(0)

    def _takers(self) -> Iterator[tuple[WholeGradients, Slot, Callable[[Tensor], None]]]:
        """What is to be called with each parameter that has got its gradient."""
        for each in self.gradients:
            for slot in each.bucket.slots:
                yield each, slot, partial(self._take, each, slot)
        if self.last is not None:
            for slot in self.last.bucket.slots:
                yield self.last, slot, partial(_take_alone, self.last, slot)

    def _take(self, gradients: WholeGradients, slot: Slot, _: Tensor) -> None:
        gradients.take(slot)
        limit = len(gradients.bucket.slots) * self.num_microbatches
        assert gradients.num_arrived <= limit, (
            "more backward passes than begin() was told: the bucket has already left"
        )
        if self.overlap or gradients.leaves_each_microbatch:
            while self._waiting and self._waiting[0][0].num_arrived >= self._waiting[0][1]:
                self._start_next()

    def _start_next(self) -> None:
        gradients, _ = self._waiting.popleft()
        self._in_flight.append(gradients.start())
        if gradients.leaves_each_microbatch:
            self._wait(MAX_IN_FLIGHT if self.overlap else 0)

    def _wait(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            self._in_flight.popleft().wait()


def _take_alone(gradients: WholeGradients, slot: Slot, _: Tensor) -> None:
    gradients.take(slot)
