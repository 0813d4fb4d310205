"""Moves hidden states and their gradients between neighbouring stages, a batch of messages at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.pipeline.messages import Batch
from megalite.topology import Axis

MAX_PENDING_SENDS = 2
"""Sends that a rank may be ahead of its neighbours: room for jitter, a bound on the tensors they keep.

To wait for an older one before the next batch is safe: the simulator proves each schedule under that rule.
"""


class Exchange:
    """This rank's end of the messages of a pipeline.

    Every batch goes through ``batch_isend_irecv``, one of a single message too: NCCL may run batches and lone
    messages on different communicators, and a message that is alone on one side has company on the other.
    """

    def __init__(self, pp: Axis, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pp = pp
        self._shape = shape
        self._dtype = dtype
        self._device = device
        # Sends, oldest first, each with its tensor, which must live until it has left.
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()
        self._arriving: tuple[dist.Work, Tensor] | None = None

    def start(self, batch: Batch, outgoing: Tensor | None) -> None:
        """Starts a batch without waiting for it.

        Args:
            batch: follows from the schedule, as the neighbours' matching ones do.
            outgoing: what `batch.send` carries, in the exchange's shape and dtype.
        """
        self._wait_for_sends(MAX_PENDING_SENDS - 1)
        operations = []
        if batch.send:
            assert outgoing is not None
            operations.append(self._operation(dist.isend, self._checked(outgoing), batch.send.receiver))
        if batch.receive:
            incoming = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            operations.append(self._operation(dist.irecv, incoming, batch.receive.sender))
        works = dist.batch_isend_irecv(operations)  # one for each message, or on NCCL one for the whole batch
        if batch.send:
            self._pending.append((works[0], operations[0].tensor))
        if batch.receive:
            self._arriving = works[-1], incoming

    def received(self) -> Tensor | None:
        """Waits for what the last batch receives; None if that was taken or there was nothing to receive."""
        if self._arriving is None:
            return None
        work, tensor = self._arriving
        self._arriving = None
        work.wait()
        return tensor

    def finish(self) -> None:
        """Waits for every send."""
        self._wait_for_sends(0)

    def _wait_for_sends(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            work, _ = self._pending.popleft()
            work.wait()

    def _operation(self, operation: Callable[..., Any], tensor: Tensor, coordinate: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self._pp.ranks[coordinate], self._pp.group)

    def _checked(self, outgoing: Tensor) -> Tensor:
        """The receiver takes bytes as they come: of another size they abort it."""
        assert outgoing.shape == self._shape, f"a stage gave {tuple(outgoing.shape)}, not {self._shape}"
        assert outgoing.dtype == self._dtype, f"a stage gave {outgoing.dtype}, not {self._dtype}"
        return outgoing.contiguous()
