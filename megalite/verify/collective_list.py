"""List the calls of torch.distributed on a rank, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megalite.distributed.topology import Topology
from megalite.recording.traffic import Traffic, message_of
from megalite.torch_private import schema_of


class Collective(NamedTuple):
    """Describes a call of torch.distributed on one rank.

    Attributes:
        in_forward: whether it ran in the forward of a microbatch.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    in_forward: bool = False

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis} of {list(self.shape)}"


class CollectiveList(Traffic):
    """Lists the calls of torch.distributed on this rank in their order.

    Attributes:
        in_forward: whether the forward of a microbatch runs.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.found: list[Collective] = []
        self.in_forward = False
        self._is_paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d" and not self._is_paused:
            self.found.append(self._collective(func, args))
        return func(*args, **(kwargs or {}))

    def _collective(self, func: Any, args: Sequence[Any]) -> Collective:
        try:
            kind, tensors = message_of(func, args)
            return Collective(kind, self.axis_of(args), tuple(tensors[0].shape), self.in_forward)
        except (KeyError, ValueError):  # a collective that only the program's own model uses
            return Collective(schema_of(func).name.removeprefix("c10d::"), "a group of its own", ())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not list the collectives of this block, which only the recording needs."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
