"""Where an iteration's time goes, by named parts, on this rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from megalite.observer import Observer, Wait, observed
from megalite.parallel.tied import EDGES
from megalite.pipeline.action import Action, Kind
from megalite.train.telemetry.marks import HostMarks, Marks, marks_for

BATCH_GENERATOR = "batch-generator"
INTERVAL = "interval-time"

_NAMES = {
    1: """
        forward-backward all-grads-sync embedding-grads-all-reduce params-all-gather optimizer
        optimizer-unscale-and-check-inf optimizer-clip-main-grad optimizer-inner-step""",
    2: """
        forward-compute backward-compute batch-generator
        forward-recv forward-send backward-recv backward-send""",
}
LEVELS = {name: level for level, names in _NAMES.items() for name in names.split()}
"""By timer, the names being Megatron-LM's: 1 what an iteration does once, 2 what it does for each microbatch.

All others are of level 0, what happens now and then: setting up, evaluating, saving.
"""

Timed = Action | Wait | str


class _Use(NamedTuple):
    """One use of a timer, in the marks that it was made with; some time is taken off instead of added."""

    begin: Any
    end: Any
    marks: Marks[Any]
    is_taken_off: bool = False

    @property
    def seconds(self) -> float:
        seconds = self.marks.seconds(self.begin, self.end)
        return -seconds if self.is_taken_off else seconds


class Timers(Observer[Timed]):
    """Sums the time spent in parts of the program: ``with timers("forward-backward"): ...``.

    Parts beyond its level cost two look-ups in a table. On a GPU those of level 1 and 2 are timed by events
    in its stream, so that kernels count where they belong and nothing is waited for until `take`.

    Args:
        device: that the parts compute on; None: the host.
        level: 0, 1 or 2; see `LEVELS`.

    Attributes:
        observers: told of every part, whatever its level.
    """

    def __init__(self, device: torch.device | None = None, level: int = 0) -> None:
        self.level = level
        self.observers: list[Observer[Any]] = [self]
        self._host = HostMarks()
        self._marks = marks_for(device or torch.device("cpu"))
        self._open: list[tuple[str, Any, Marks[Any]]] = []
        self._uses: dict[str, list[_Use]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Adds the block's time to the timer `name`, also where the block raises."""
        return observed(self.observers, name)

    def begins(self, what: Timed) -> None:
        name = _timer_of(what)
        if self._counts(name):
            marks = self._marks if name in LEVELS else self._host
            self._open.append((name, marks.now(), marks))

    def ends(self, what: Timed) -> None:
        name = _timer_of(what)
        while any(name == open_name for open_name, *_ in self._open):
            open_name, begin, marks = self._open.pop()  # what an exception has broken off is left out
            if open_name == name:
                self._add(name, _Use(begin, marks.now(), marks), isinstance(what, Wait))
                return

    def take(self, num_iterations: int = 1) -> dict[str, float]:
        """Milliseconds of each timer used since the last call, and starts anew.

        What every iteration uses, once or several times, is told as the mean of an iteration; what is used
        less often (an evaluation, a save) as the mean of one use.
        """
        uses, self._uses = self._uses, {}
        return {name: 1e3 * _mean(of_name, num_iterations) for name, of_name in uses.items()}

    def _counts(self, name: str) -> bool:
        """Whether it is timed; what happens within one of level 0 is part of that one alone."""
        if LEVELS.get(name, 0) > self.level or not name:
            return False
        return not self._open or self._open[0][0] in LEVELS

    def _add(self, name: str, use: _Use, is_wait: bool) -> None:
        self._uses.setdefault(name, []).append(use)
        if is_wait and self._open and self._open[-1][0] in _COMPUTING.values():
            self._uses.setdefault(self._open[-1][0], []).append(use._replace(is_taken_off=True))


_COMPUTING = {
    Kind.FORWARD: "forward-compute",
    Kind.BACKWARD: "backward-compute",
    Kind.BACKWARD_INPUT: "backward-compute",
    Kind.BACKWARD_WEIGHT: "backward-compute",
}
_WAITS = {
    **{Wait("pp", name): name for name in LEVELS if name.endswith(("-recv", "-send"))},
    Wait("pp", EDGES): EDGES,
    Wait("dp", "all-gather"): "params-all-gather",
}


def _timer_of(what: Timed) -> str:
    """Name of the timer; empty where there is none."""
    if isinstance(what, Action):
        return _COMPUTING[what.kind]
    if isinstance(what, Wait):
        return _WAITS.get(what, "")
    return what


def _mean(uses: list[_Use], num_iterations: int) -> float:
    num_uses = sum(not use.is_taken_off for use in uses)
    return sum(use.seconds for use in uses) / max(1, min(num_uses, num_iterations))
