"""The result of an audit, and the vote that decides which ranks are wrong."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from megalite.distributed.axes import coordinates_text
from megalite.distributed.topology import Topology
from megalite.errors import UserError, few
from megalite.hardware.device_name import device_name


class Finding(NamedTuple):
    """Describes a difference that an audit found.

    Attributes:
        names: tensors that differ; those of a microbatch in the order in which they are computed.
        what: how they differ, as a clause for the message.
        suspects: global ranks of the devices.
        is_voted: whether a majority outvoted them; otherwise one of them is wrong.
    """

    names: tuple[str, ...]
    what: str
    suspects: tuple[int, ...]
    is_voted: bool

    def text(self, topology: Topology) -> str:
        """Return the difference and the devices as a clause; a collective."""
        mine = (
            f"rank {topology.rank} (host {socket.gethostname()}, {topology.device}, "
            f"{device_name(topology.device)}; {coordinates_text(topology.coordinates)})"
        )
        devices = [mine] * topology.world_size
        with topology.world.wait("all-gather", "audit"):
            dist.all_gather_object(devices, mine)
        named = few([devices[rank] for rank in self.suspects], 8)
        one_of = "" if self.is_voted or len(self.suspects) == 1 else "one of "
        return f"{few(self.names)} {self.what}; wrong: {one_of}{named}"


class AuditFailed(UserError):
    """Raised on every rank if an audit finds a difference: a device has computed wrongly.

    Attributes:
        finding: the difference.
    """

    finding: Finding | None = None


def outliers(values: Mapping[int, Hashable]) -> set[int] | None:
    """Return the ranks whose value is not that of the majority; None if no value has a majority."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return None
    return {rank for rank, other in values.items() if other != value}
