"""Placement: the box of a parameter that a rank holds, and the ranks that share the work on it.

Both follow from the parameter's cuts and from the axes over which its gradient is partial. Initial values,
reductions, norms and checkpoints use what is here, and decide nothing themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megalite.distributed.axis import Axis, AxisSet
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class Cut:
    """Division of a parameter along `dim` into equal slices, one for each rank of the mesh axis `axis`."""

    axis: str
    dim: int


class Box(NamedTuple):
    """Box of a full tensor: an index range along each dim.

    Attributes:
        starts: index of its first element along each dim.
        shape: its size along each dim.
    """

    starts: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, full: Tensor) -> Tensor:
        """Return the view of a full tensor that is this box."""
        return full[tuple(map(slice, self.starts, self.ends))]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(int.__add__, self.starts, self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box:
        """Return the elements that the other box also has; the result can be empty."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = map(min, self.ends, other.ends)
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def within(self, other: Box) -> Box:
        """Return this box as a part of another box of the same tensor."""
        return Box(tuple(map(int.__sub__, self.starts, other.starts)), self.shape)

    def num_before(self, row: int) -> int:
        """Return how many elements of the flattened box come before this row of the full tensor."""
        return min(max(row - self.starts[0], 0), self.shape[0]) * math.prod(self.shape[1:])


class ParameterAxes(NamedTuple):
    """Axes whose ranks hold a parameter, apart from the dims of its cuts.

    Attributes:
        cut_over: names of the axes that cut it, sorted.
        partial_over: names of the axes over which its gradient is a partial sum, sorted. The axes of its
            replicas, over which buckets are always reduced, are not among them.
    """

    cut_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()

    def axes(self, topology: Topology) -> AxisSet:
        """Return the axes that place the parameter: the first mesh of the ranks that has all of them.

        Raises:
            UserError: no mesh has all of them, or an axis cannot cut or complete a parameter.
        """
        wanted = {*self.cut_over, *self.partial_over}
        found = next((each for each in topology.meshes.values() if wanted <= each.axes.keys()), None)
        if found is None:
            tables = " or ".join(str(list(each.axes)) for each in topology.meshes.values())
            raise UserError(
                f"a parameter is cut or partial over {sorted(wanted)}: all axes must be among {tables}"
            )
        for axis in found.mesh_spec.axes:
            if axis.name in self.cut_over and "weights" not in axis.roles:
                cutting = " or ".join(found.mesh_spec.with_role("weights"))
                raise UserError(
                    f"a parameter is cut over {axis.name}, whose ranks hold the same parameters: cut it over "
                    f"{cutting}"
                )
            if axis.name in self.partial_over and ("replicas" in axis.roles or axis.name in self.cut_over):
                raise UserError(
                    f"a parameter's gradient cannot be partial over {axis.name}, which "
                    f"{'cuts' if axis.name in self.cut_over else 'replicates'} the parameter: remove it from "
                    "partial_over"
                )
        return found

    def replicas(self, topology: Topology) -> Axis:
        """Return the ranks that sum their gradients and share the optimizer's work, by buckets."""
        return self.axes(topology).with_role("replicas")

    def holders(self, topology: Topology) -> Axis:
        """Return the ranks that together hold all boxes of the parameter, and their replicas."""
        axes = self.axes(topology)
        return axes.over(*self.cut_over, *axes.mesh_spec.with_role("replicas"))

    def partial_axis(self, topology: Topology) -> Axis | None:
        """Return the ranks over which the sum of the replicas' gradients must be summed too, if any."""
        axis = self.axes(topology).over(*self.partial_over) if self.partial_over else None
        return axis if axis is not None and axis.size > 1 else None

    def acts(self, topology: Topology) -> bool:
        """Return whether this rank counts the parameter's elements in norms, and writes them.

        Of the ranks that hold the same box, the replicas divide its elements; of the others, the first acts.
        """
        axes = self.axes(topology)
        cutting = (axes.axes[name] for name in self.cut_over)
        return axes.is_first_outside(topology.pp, axes.with_role("replicas"), *cutting)
