"""Test the transfer of scalars to the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.train.async_scalars import AsyncScalars


def test_values_are_those_at_the_start_of_the_copy() -> None:
    loss, norm = torch.tensor(1.5, dtype=torch.float64), torch.tensor(math.inf, dtype=torch.float64)
    scalars = AsyncScalars(loss, norm)
    loss += 1.0
    assert scalars.read() == [1.5, math.inf]


def test_nothing_waits_for_a_gpu_until_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test one copy to pinned memory, then an event: `read` does not wait for work that is queued later."""
    calls: list[str] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

    def pinned(*size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        calls.append(f"pinned: {pin_memory}")
        return empty(*size, **options)

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        calls.append(f"copy of {source.numel()}, without a wait: {non_blocking}")
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    scalars = AsyncScalars(torch.tensor(1.0), torch.tensor(2.0))
    assert calls == ["pinned: True", "copy of 2, without a wait: True", "record"]
    assert scalars.read() == [1.0, 2.0]
    assert calls[3:] == ["wait"]
