"""A flip changes one bit, and the table of audits counts what becomes of flips."""

from __future__ import annotations

import pytest
import torch

from tests.power import measure_audit
from tests.power.bit_flips import flip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_one_bit_is_flipped(dtype: torch.dtype, seed: int) -> None:
    tensor = torch.randn(3, 4, dtype=dtype).t()  # not contiguous
    before = tensor.clone()
    flip(tensor, seed)
    changed = before.contiguous().view(torch.uint8) ^ tensor.contiguous().view(torch.uint8)
    assert sum(int(byte).bit_count() for byte in changed.view(-1)) == 1


@pytest.mark.slow
def test_a_row_counts_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_audit, "NUM_FLIPS", 2)
    row = measure_audit.row("dp3", "activations, always")
    found, _, alone, *others = [each.strip() for each in row.split("|")[3:-1]]
    assert (found, alone, others) == ("2", "2", ["0", "0", "0"])
