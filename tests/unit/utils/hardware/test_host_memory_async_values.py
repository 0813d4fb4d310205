"""Test the transfer of values to the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.utils.hardware.host_memory import AsyncValues


def test_values_are_those_at_the_start_of_the_copy() -> None:
    loss, norm = torch.tensor(1.5, dtype=torch.float64), torch.tensor(math.inf, dtype=torch.float64)
    values = AsyncValues(torch.stack((loss, norm)))
    loss += 1.0
    assert values.read() == [1.5, math.inf]


def test_nothing_waits_for_a_gpu_until_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test one copy to pinned memory, then an event: `read` does not wait for work that is queued later."""
    calls: list[str] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

    def pinned(*size: object, pin_memory: bool, **options: Any) -> torch.Tensor:
        calls.append(f"pinned: {pin_memory}")
        return empty(*size, **options)

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        calls.append(f"copy of {source.numel()}, without a wait: {non_blocking}")
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    values = AsyncValues(torch.tensor([1.0, 2.0]))
    assert calls == ["pinned: True", "copy of 2, without a wait: True", "record"]
    assert values.read() == [1.0, 2.0]
    assert calls[3:] == ["wait"]
