"""Moves hidden states and their gradients between stages, a batch of messages at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.messages import MAX_OPEN_BATCHES, Batch
from megalite.topology import Axis

Parcel = tuple[Tensor, int]
"""A tensor to send or to fill, and the other rank's coordinate along the axis."""

Launched = tuple[list[dist.Work], "dist.Work | None"]
"""The works of a batch's receives and of its send."""


class Exchange:
    """This rank's end of the messages of a pipeline."""

    def __init__(self, pp: Axis, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pp = pp
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._launch = _launch_together if device.type == "cuda" else _launch_each  # by NCCL, and by gloo
        # Sends, oldest first, each with its direction and its tensor, which must live until it has left.
        self._pending: deque[tuple[dist.Work, str, Tensor]] = deque()
        self._arriving: dict[Action, tuple[dist.Work, Tensor]] = {}  # by the action that reads it

    def start(self, batch: Batch, outgoing: Tensor | None) -> None:
        """Starts a batch without waiting for it.

        Args:
            batch: follows from the schedule, as the neighbours' matching ones do.
            outgoing: what `batch.send` carries, in the exchange's shape and dtype.
        """
        send: Parcel | None = None
        if batch.send:
            self._wait_for_sends(MAX_OPEN_BATCHES - 1)
            assert outgoing is not None
            send = self._checked(outgoing), batch.send.receiver
        receives = [
            (torch.empty(self._shape, dtype=self._dtype, device=self._device), message.sender)
            for message in batch.receives
        ]
        received, sent = self._launch(self._pp, receives, send)
        for message, work, (tensor, _) in zip(batch.receives, received, receives, strict=True):
            self._arriving[message.reader] = work, tensor
        if send and sent:
            assert batch.send is not None
            self._pending.append((sent, _direction(batch.send.reader), send[0]))

    def received(self, reader: Action) -> Tensor:
        """Waits for the input of `reader`, which a batch before it has started to receive."""
        work, tensor = self._arriving.pop(reader)
        what = f"{_direction(reader)}-recv"
        self._pp.wait_begins(what)
        work.wait()
        self._pp.wait_ends(what)
        return tensor

    def finish(self) -> None:
        """Waits for every send."""
        self._wait_for_sends(0)

    def _wait_for_sends(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            work, direction, _ = self._pending.popleft()
            self._pp.wait_begins(f"{direction}-send")
            work.wait()
            self._pp.wait_ends(f"{direction}-send")

    def _checked(self, outgoing: Tensor) -> Tensor:
        """The receiver takes bytes as they come: of another size they abort it."""
        assert outgoing.shape == self._shape, f"a stage gave {tuple(outgoing.shape)}, not {self._shape}"
        assert outgoing.dtype == self._dtype, f"a stage gave {outgoing.dtype}, not {self._dtype}"
        return outgoing.contiguous()


def _direction(reader: Action) -> str:
    """Which way a message goes: with the microbatch or back with its gradient."""
    return "forward" if reader.kind is Kind.FORWARD else "backward"


def _launch_together(pp: Axis, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Starts messages as one operation of NCCL, which one work stands for.

    One of a single message goes the same way: NCCL may run batches and lone messages on different
    communicators, and a message that is alone on one side has company on the other.
    """
    operations = [dist.P2POp(dist.irecv, tensor, pp.ranks[peer], pp.group) for tensor, peer in receives]
    if send:
        operations.append(dist.P2POp(dist.isend, send[0], pp.ranks[send[1]], pp.group))
    work = dist.batch_isend_irecv(operations)[-1]
    return [work] * len(receives), work if send else None


def _launch_each(pp: Axis, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Starts messages one by one, where the backend asks for no order between ranks.

    The group's own methods: what torch checks in front of them takes longer than they do.
    """
    works = [pp.group.recv([tensor], peer, 0) for tensor, peer in receives]
    return works, pp.group.send([send[0]], send[1], 0) if send else None
