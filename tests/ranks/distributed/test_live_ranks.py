"""A test gets live ranks as the test before it got them."""

from __future__ import annotations

import logging
import os
import signal

import torch

from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.log import log
from tests.live_ranks import run_ranks


def _changed(topology: Topology) -> list[object]:
    """Return what this rank finds in its process, and change it."""
    number = torch.rand(1).item()
    found = [os.getpid(), os.environ.get("OF_A_TEST"), len(log.filters), len(log.handlers), log.level]
    found.append(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)
    os.environ["OF_A_TEST"] = "1"
    log.addFilter(lambda _: False)
    log.addHandler(logging.NullHandler())
    log.setLevel(logging.DEBUG)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return [*found, number]


def test_what_a_function_changes_in_its_process_is_restored() -> None:
    first, second = (run_ranks(_changed, ParallelConfig().mesh, 1) for _ in range(2))
    assert first == second
