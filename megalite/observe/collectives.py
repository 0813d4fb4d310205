"""Count or list collectives and messages as they reach the process groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megalite.distributed.topology import Topology
from megalite.observe.recorder import Reader
from megalite.observe.unit_record import CollectiveCall
from megalite.utils.torch_private import schema_of, tree_leaves


class _Operator(NamedTuple):
    """Operator of c10d.

    Attributes:
        kind: usual name of the operator.
        whole: index of the argument with the message, or with the elements of all ranks.
    """

    kind: str
    whole: int


_OPERATORS = {
    "allreduce_": _Operator("all-reduce", 0),
    "_allgather_base_": _Operator("all-gather", 0),
    "_reduce_scatter_base_": _Operator("reduce-scatter", 1),
    "alltoall_base_": _Operator("all-to-all", 1),
    "send": _Operator("send", 0),
    "recv_": _Operator("receive", 0),
}
"""The operators that training uses. Any other raises a `KeyError`, so none is missed."""


class Traffic(Reader):
    """Counter of all calls of torch.distributed on each axis.

    Attributes:
        calls: number of each call.
    """

    def __init__(self, topology: Topology) -> None:
        # An axis can share its group with the world; it counts as the axis, which comes later here.
        axes = reversed(topology.groups())
        groups = [(axis.name, group) for axis in axes for group in (axis.group, axis.backward_group)]
        self._axes = {group.group_name: name for name, group in groups if group is not None}
        self.calls: Counter[CollectiveCall] = Counter()

    def reads(self, func: Any) -> bool:
        return is_collective(func)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.calls[self.call_of(func, args)] += 1

    def call_of(self, func: Any, args: Sequence[Any]) -> CollectiveCall:
        """Return what an operator of c10d does."""
        kind, tensors = message_of(func, args)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if kind == "all-to-all":
            num_bytes = max(num_bytes, args[0].nbytes)  # what the rank receives
        return CollectiveCall(self.axis_of(args), kind, dtype, num_bytes)

    def axis_of(self, args: Sequence[Any]) -> str:
        """Return the name of the axis whose group is among an operator's arguments.

        Raises:
            KeyError: it is no group of the topology.
        """
        (group,) = (arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        return self._axes[dist.ProcessGroup.unbox(group).group_name]


class Collective(NamedTuple):
    """Call of torch.distributed on one rank.

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
    """List of the calls of torch.distributed on this rank, in their order.

    Attributes:
        in_forward: whether the forward of a microbatch runs.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.found: list[Collective] = []
        self.in_forward = False
        self._is_paused = False

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not self._is_paused:
            self.found.append(self._collective(func, args))

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


def is_collective(func: Any) -> bool:
    """Return whether an operator is a collective or a message of torch.distributed."""
    return bool(func.namespace == "c10d")


def message_of(func: Any, args: Sequence[Any]) -> tuple[str, list[torch.Tensor]]:
    """Return the kind of an operator of c10d, and the tensors with its message or the elements of all ranks.

    Raises:
        KeyError: training does not use the operator.
    """
    operator = _OPERATORS[schema_of(func).name.removeprefix("c10d::")]
    leaves = tree_leaves(args[operator.whole])
    return operator.kind, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_group(argument: torch.ScriptObject) -> bool:
    try:
        dist.ProcessGroup.unbox(argument)
    except RuntimeError:
        return False
    return True


_RING_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "all-gather": lambda size: (size - 1) / size,
    "reduce-scatter": lambda size: (size - 1) / size,
    "all-to-all": lambda size: (size - 1) / size,
    "send": lambda size: 1.0,
    "receive": lambda size: 0.0,
}


def ring_bytes(calls: Mapping[CollectiveCall, int], axis: str, size: int) -> float:
    """Return the bytes that a rank sends on an axis of `size` ranks with ring collectives.

    In an all-gather or reduce-scatter of n bytes every rank sends n (size - 1) / size; an all-reduce is one
    of each (Narayanan et al. 2021, section 3.2).
    """
    return sum(
        _RING_FACTORS[call.kind](size) * call.num_bytes * count
        for call, count in calls.items()
        if call.axis == axis
    )
