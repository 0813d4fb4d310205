"""Provide metrics, a one-rank topology and a lost lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.checkpoint import lease as lease_module
from megalite.checkpoint.lease import HeldLease
from megalite.config import ParallelConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.telemetry.metrics import IterationMetrics


@pytest.fixture
def metrics() -> IterationMetrics:
    return IterationMetrics(
        iteration=100,
        consumed_samples=800,
        consumed_tokens=819200,
        lm_loss=7.44895,
        grad_norm=1.3031,
        learning_rate=5.822e-5,
        global_batch_size=8,
        loss_scale=1.0,
        skipped=False,
        iteration_time_ms=537.3,
        tokens_per_second=15246.6,
        tflops_per_gpu=117.7,
        mfu=None,
        memory_allocated_mb=1.5,
        memory_reserved_mb=2.0,
        train_iters=100,
        num_iterations=10,
        num_skipped=0,
        num_nan=0,
        device="cpu",
    )


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)) as topology:
        yield topology


@pytest.fixture
def lost_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldLease]:
    """Return a lease on a folder that another run has taken over."""
    monkeypatch.setattr(lease_module, "_CHECK_SECONDS", 0.0)
    lease = HeldLease.take(tmp_path / "save")
    (tmp_path / "save" / f"lease.{lease.number}").rename(tmp_path / "save" / "lease.2")
    yield lease
    lease.release()
