"""What a rank does in a pipeline's step, one piece of work at a time."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a rank computes for a microbatch.

    A schedule has whole backward passes, or every one in two parts: the input's gradient, which the stage
    before waits for, and the weights', for which there is time until the update (Qi et al. 2023).
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"

    __hash__ = object.__hash__  # actions are looked up often, and Enum's own is slow

    @property
    def downstream(self) -> int:
        """Stages by which its output moves on: 1, -1, or 0 where nothing leaves."""
        return _DOWNSTREAM[self]

    @property
    def units(self) -> int:
        """Usual time: a backward pass makes two products where the forward makes one."""
        return 2 if self is Kind.BACKWARD else 1


_DOWNSTREAM = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1, Kind.BACKWARD_WEIGHT: 0}


class Action(NamedTuple):
    """One piece of a rank's work.

    Attributes:
        microbatch: its number within the step, in [0, num_microbatches).
        chunk: which of the rank's parts of the model computes; `stages.StageMap` tells its global stage.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.value} {self.microbatch}{chunk}"
