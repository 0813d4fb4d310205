"""Run functions on ranks that stay alive from test to test: their start takes much of a short test's time.

Some tests import `run_ranks` and `record_run` from megalite instead, which start new ranks: tests of models
of their own, because a rank keeps what such code changes in it; compiled ones, because torch keeps what it
has compiled; and those of the process itself: its memory, its threads, its search path.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megalite.distributed.axes import MeshOptions
from megalite.distributed.local_ranks import LocalRanks
from megalite.distributed.topology import Topology
from megalite.log import log
from megalite.verify.record_run import record_run as record_on

RANKS = LocalRanks()
"""Ranks of this process of pytest. `conftest.py` of each folder ends them after its last test."""
record_run = partial(record_on, ranks=RANKS)


def run_ranks(
    function: Callable[..., Any],
    options: MeshOptions,
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
) -> list[Any]:
    """Call the function as `megalite.distributed.local_ranks.run_ranks` does, on ranks that stay alive.

    The function may change the logger, the environment, signal handlers and torch's random state. What else
    it changes in its process, it must undo, even in modules: use ``mock.patch.object``.
    """
    return RANKS.run(_call, options, world_size, function, *args, timeout=timeout)


def _call(topology: Topology, function: Callable[..., Any], *args: Any) -> Any:
    with _restored_process(), torch.random.fork_rng(devices=[]):
        return function(topology, *args)


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what a function of a rank may change in its process."""
    environment = dict(os.environ)
    handlers, filters, level = log.handlers[:], log.filters[:], log.level
    of_signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        log.handlers[:], log.filters[:], log.propagate = handlers, filters, True
        log.setLevel(level)
        for number, handler in of_signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
