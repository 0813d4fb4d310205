"""Run functions on ranks that stay alive from test to test: their start takes much of a short test's time.

Some tests import `run_ranks` and `record_run` from megalite instead, which start new ranks: tests that
compile, because torch keeps what it has compiled; tests whose faults are not undone; and tests of the process
itself: its memory, its threads, its search path.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megalite.config import Config
from megalite.distributed.axes import MeshOptions
from megalite.distributed.local_ranks import LocalRanks
from megalite.distributed.topology import Topology
from megalite.observe.verify.record_run import record_run as record_on
from megalite.train.trainer import start_trainer
from megalite.utils.log import log


class LiveRanks(LocalRanks):
    """Restores the process of a rank after each call.

    A function may change the logger, the environment, signal handlers, the working directory, the limit of
    the size of files, torch's random state and its deterministic mode. What else it changes in its process,
    it must undo, even in modules: use ``mock.patch.object``.
    """

    def run(
        self,
        function: Callable[..., Any],
        options: MeshOptions,
        world_size: int,
        *args: Any,
        timeout: float = 300.0,
    ) -> list[Any]:
        return super().run(_call, options, world_size, function, *args, timeout=timeout)


RANKS = LiveRanks()
"""Ranks of this process of pytest; `tests/conftest.py` ends them before tests that need one process."""
run_ranks = RANKS.run
record_run = partial(record_on, ranks=RANKS)


def continued_losses(topology: Topology, config: Config, num_steps: int) -> list[float]:
    """Return the losses from the last checkpoint on, if there is one, and save another one."""
    with start_trainer(config, topology) as trainer:
        trainer.load()
        losses = [trainer.step().loss for _ in range(num_steps)]
        trainer.save()
    return losses


def _call(topology: Topology, function: Callable[..., Any], *args: Any) -> Any:
    os.fsync = os.fstat  # as in tests/conftest.py
    gc.get_freeze_count = lambda: 1  # a rank freezes what it has imported; each run would count these objects
    with _restored_process(), torch.random.fork_rng(devices=[]):
        result = function(topology, *args)
    assert _get_current_dispatch_mode() is None, "the function has left a mode of torch on"
    return result


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what a function of a rank may change in its process."""
    environment, folder = dict(os.environ), os.getcwd()
    file_sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
    handlers, filters, level = log.handlers[:], log.filters[:], log.level
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    of_signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, file_sizes)
        log.handlers[:], log.filters[:], log.propagate = handlers, filters, True
        if log.level != level:  # setting it clears what each logger has cached
            log.setLevel(level)
        torch.use_deterministic_algorithms(is_deterministic)
        for number, handler in of_signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
