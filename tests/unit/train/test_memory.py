"""The resident set follows what the process holds."""

from __future__ import annotations

import numpy as np
import torch

from megalite.train.memory import measure_memory


def test_resident_set_grows_and_its_peak_stays() -> None:
    cpu = torch.device("cpu")
    before = measure_memory(cpu)
    held = np.ones(64 * 2**20, dtype=np.uint8)
    during = measure_memory(cpu)
    assert 60 < during.allocated - before.allocated < 80
    assert during.reserved >= during.allocated
    del held
    after = measure_memory(cpu)
    assert after.allocated < during.allocated - 50
    assert after.reserved >= during.allocated - 1  # the kernel counts pages in batches
