"""Every collective and message of a piece of work, as the process groups see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.topology import Topology

WHOLE = {"allreduce_": 0, "_allgather_base_": 0, "_reduce_scatter_base_": 1, "send": 0, "recv_": 0}
"""c10d's operators, and which argument is the tensor that holds all ranks' elements, or the message."""
NAMES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "send": "send",
    "recv_": "receive",
}


class Traffic(TorchDispatchMode):
    """Counts the calls on each axis: nothing that goes through torch.distributed can pass it by.

    Attributes:
        calls: number of calls by axis, kind and bytes of the whole tensor.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.axes = {getattr(topology, name).group.group_name: name for name in ("pp", "dp", "tp")}
        self.calls: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace, _, rest = str(func).partition(".")
        if namespace == "c10d":
            self._count(rest.removesuffix(".default"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Sequence[Any]) -> None:
        (group,) = (arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        tensors = [leaf for leaf in tree_leaves(args[WHOLE[op]]) if isinstance(leaf, torch.Tensor)]
        name = self.axes.get(dist.ProcessGroup.unbox(group).group_name, "world")
        self.calls[name, NAMES[op], sum(tensor.nbytes for tensor in tensors)] += 1


def _is_group(argument: torch.ScriptObject) -> bool:
    try:
        dist.ProcessGroup.unbox(argument)
    except RuntimeError:
        return False
    return True


def ring_bytes(calls: Mapping[tuple[str, str, int], int], axis: str, size: int) -> float:
    """Bytes that a rank sends on an axis, where collectives run in rings.

    An all-gather or reduce-scatter of n bytes passes n (size - 1) / size through every rank, an all-reduce is
    one of each (Narayanan et al. 2021, section 3.2); a message passes whole.
    """
    steps = (size - 1) / size
    cost = {
        "all-reduce": 2 * steps,
        "all-gather": steps,
        "reduce-scatter": steps,
        "send": 1.0,
        "receive": 0.0,
    }
    return sum(cost[kind] * size_ * count for (name, kind, size_), count in calls.items() if name == axis)
