"""Send and receive hidden states and their gradients between stages, a batch of messages at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.axis import Axis
from megalite.pipeline.messages import MAX_OPEN_BATCHES, Batch, Direction, StageMessage
from megalite.pipeline.schedules import Action

Parcel = tuple[Tensor, int]
"""A tensor to send or to receive into, and the other rank's coordinate along the axis."""

Launched = tuple[list[dist.Work], "dist.Work | None"]
"""The works of a batch's receives, and the work of its send."""


class PointToPoint:
    """Messages of one rank of a pipeline. All tensors of a step have the same shape.

    Args:
        pp: the pipeline axis.
        dtype: dtype of the hidden states.
        device: device of the hidden states.
    """

    def __init__(self, pp: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self.pp = pp
        self._dtype = dtype
        self._device = device
        self._launch = _launch_together if device.type == "cuda" else _launch_each  # by NCCL, and by gloo
        self._groups: dict[Direction, dist.ProcessGroup] = {
            "forward": pp.group,
            "backward": pp.backward_group or pp.group,
        }
        # Sends, oldest first, each with its message and its tensor, which must live until it has been sent.
        self._pending: dict[Direction, deque[tuple[dist.Work, StageMessage, Tensor]]] = defaultdict(deque)
        self._arriving: dict[Action, tuple[dist.Work, Tensor, StageMessage]] = {}  # by its reader

    def start(self, batch: Batch, outgoing: Tensor | None, shape: tuple[int, ...]) -> None:
        """Start a batch without waiting for it.

        Args:
            batch: a batch of this rank's plan; see `plan_rank`.
            outgoing: the tensor to send, if the batch has a send.
            shape: shape of each tensor.
        """
        send: Parcel | None = None
        if batch.send:
            self._wait_for_sends(batch.direction, MAX_OPEN_BATCHES - 1)
            assert outgoing is not None
            send = self._checked(outgoing, shape), batch.send.receiver
        receives = [
            (torch.empty(shape, dtype=self._dtype, device=self._device), message.sender)
            for message in batch.receives
        ]
        received, sent = self._launch(self._groups[batch.direction], receives, send)
        for message, work, (tensor, _) in zip(batch.receives, received, receives, strict=True):
            self._arriving[message.reader] = work, tensor, message
        if send and sent:
            assert batch.send is not None
            self._pending[batch.direction].append((sent, batch.send, send[0]))

    def received(self, reader: Action) -> Tensor:
        """Wait for the input of `reader` and return it; an earlier batch has started to receive it."""
        work, tensor, message = self._arriving.pop(reader)
        self._wait(work, f"{message.direction}-recv", reader, message.sender)
        return tensor

    def finish(self) -> None:
        """Wait for every send."""
        for direction in self._groups:
            self._wait_for_sends(direction, 0)

    def _wait_for_sends(self, direction: Direction, num_left: int) -> None:
        pending = self._pending[direction]
        while len(pending) > num_left:
            work, message, _ = pending.popleft()
            self._wait(work, f"{direction}-send", message.reader, message.receiver)

    def _wait(self, work: dist.Work, what: str, reader: Action, peer: int) -> None:
        self.pp.wait_begins(what, reader, self.pp.ranks[peer])
        work.wait()
        self.pp.wait_ends(what, reader, self.pp.ranks[peer])

    def _checked(self, outgoing: Tensor, shape: tuple[int, ...]) -> Tensor:
        # The receiver does not check the size, and a different number of bytes would abort it.
        assert outgoing.shape == shape, f"a stage returned {tuple(outgoing.shape)}, not {shape}"
        assert outgoing.dtype == self._dtype, f"a stage returned {outgoing.dtype}, not {self._dtype}"
        return outgoing.contiguous()


def _launch_together(group: dist.ProcessGroup, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Start all messages as one NCCL operation with one work.

    A single message is also started this way, because NCCL may use different communicators for batches and
    single messages, and the other rank may have the message in a batch.
    """
    operations = [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=sender) for tensor, sender in receives
    ]
    if send:
        operations.append(dist.P2POp(dist.isend, send[0], group=group, group_peer=send[1]))
    work = dist.batch_isend_irecv(operations)[-1]
    return [work] * len(receives), work if send else None


def _launch_each(group: dist.ProcessGroup, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Start messages one by one, for gloo, which matches sends and receives in any order.

    This calls the methods of the process group, because torch.distributed's functions add slow checks.
    """
    works = [group.recv([tensor], sender, 0) for tensor, sender in receives]
    return works, group.send([send[0]], send[1], 0) if send else None
