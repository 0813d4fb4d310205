"""A run with optimizer state and activations off the device is bitwise the run without, with dropout."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord
from tests.live_ranks import record_run
from tests.parity import models

NUM_ITERATIONS = 50
NUM_IN_CORE = 6
PLACES = ("memory", "half", "file", "all")
"""Of the optimizer's state; with "all" it is in a file, and activations are in host memory."""
CORE = [("bf16", "dp2+zero1", "memory"), ("fp32", "dp2+zero3", "all")]
ROWS = [
    (dtype, name, place)
    for dtype in ("bf16", "fp32")
    for name in ("dp2", "dp2+zero1+gather", "dp2+zero1", "dp2+zero2", "dp2+zero3", "tp2pp2+sp")
    for place in PLACES
]


def _run(name: str, dtype: str, corpus: str, num_iterations: int, **offload: object) -> RunRecord:
    layout = Layout.parse(name)
    config = models.config_of("gpt-tiny", dtype, corpus)
    config = replace(
        config,
        optimizer=replace(config.optimizer, **offload),
        parallel=replace(config.parallel, ddp_bucket_size=100_000),  # several buckets
        training=replace(config.training, train_iters=num_iterations),
    )
    return record_run(layout.apply(config, models.GLOBAL_BATCH_SIZE), num_iterations, layout.world_size)


_reference = functools.cache(_run)


@pytest.mark.parametrize(
    ("dtype", "name", "place", "num_iterations"),
    [
        *((*row, NUM_IN_CORE) for row in CORE),
        *(pytest.param(*row, NUM_ITERATIONS, marks=pytest.mark.slow) for row in ROWS),
    ],
)
def test_offloading_changes_no_bit(
    dtype: str, name: str, place: str, num_iterations: int, corpus: str, tmp_path: Path
) -> None:
    offload = {
        "memory": {"optimizer_cpu_offload": True},
        "half": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        "file": {"optimizer_nvme_offload": str(tmp_path)},
        "all": {"optimizer_nvme_offload": str(tmp_path)},
    }[place]
    expected = _reference(name, dtype, corpus, num_iterations)
    found = _run(f"{name}+offload" if place == "all" else name, dtype, corpus, num_iterations, **offload)
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    assert all(found.weights[key].equal(expected.weights[key]) for key in expected.weights)
    assert len(set(found.losses)) == num_iterations
    assert not list(tmp_path.iterdir())
