"""Test that the resident set follows the memory that the process holds."""

from __future__ import annotations

import mmap

import torch

from megalite.train.telemetry.metrics import measure_memory


def test_resident_set_grows_and_its_peak_stays() -> None:
    cpu = torch.device("cpu")
    before = measure_memory(cpu)
    held = mmap.mmap(-1, 64 * 2**20)  # past the allocator, which may keep what is freed
    for _ in range(64):
        held.write(b"x" * 2**20)
    during = measure_memory(cpu)
    assert 60 < during.allocated - before.allocated < 80
    assert during.reserved >= during.allocated
    held.close()
    after = measure_memory(cpu)
    assert after.allocated < during.allocated - 50
    assert after.reserved >= during.allocated - 1  # the kernel counts pages in batches
