"""A trace of a few iterations, for TensorBoard's profiler page, Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch.profiler
from torch.profiler import ProfilerActivity

from megalite.config import LoggingConfig
from megalite.folders import make_writable
from megalite.log import log
from megalite.topology import Topology

_WAIT, _WARMUP, _ACTIVE = 1, 1, 3
"""Iterations that are passed over (allocations), that warm the profiler up, and that are traced."""

_FIRST = _WAIT + _WARMUP + 1
"""The first traced one, counted from 1."""

_DEFAULT_NAME = "profile"


class Profile(Protocol):
    """A profile under way."""

    def step(self) -> None:
        """Tells that an iteration has ended."""


class _NoProfile:
    def step(self) -> None:
        pass


@contextmanager
def profiler(config: LoggingConfig, topology: Topology) -> Iterator[Profile]:
    """Traces iterations 3 to 5 of the block into ``tensorboard_dir/profile_name/rank<N>.*.pt.trace.json``.

    Every rank writes a trace of its own. Without --profile-execution nothing happens at all. A collective.

    Raises:
        UserError: a rank cannot write into the folder; on every rank alike.
    """
    if not config.profile_execution:
        yield _NoProfile()
        return
    assert config.tensorboard_dir is not None  # a rule of the config
    folder = Path(config.tensorboard_dir) / (config.profile_name or _DEFAULT_NAME)
    with topology.agreed():
        make_writable(folder, "--tensorboard-dir")
    write = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{topology.rank}")
    is_written = False

    def on_trace_ready(profile: torch.profiler.profile) -> None:
        nonlocal is_written
        write(profile)
        is_written = True
        log.info("profiler: the trace is in %s", folder)

    with torch.profiler.profile(
        activities=_activities(topology),
        schedule=torch.profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1),
        on_trace_ready=on_trace_ready,
    ) as profile:
        yield profile
    if not is_written:
        log.warning("--profile-execution: no trace, as the run had no iteration %d", _FIRST)


def _activities(topology: Topology) -> list[ProfilerActivity]:
    on_cuda = [ProfilerActivity.CUDA] if topology.device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_cuda]
