"""Numbers on their way to the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.train.readout import Readout


def test_what_was_there_when_the_copy_began() -> None:
    loss, norm = torch.tensor(1.5, dtype=torch.float64), torch.tensor(math.inf, dtype=torch.float64)
    readout = Readout(loss, norm)
    loss += 1.0
    assert readout.read() == [1.5, math.inf]


def test_of_a_gpu_nothing_is_waited_for_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to pinned memory, then an event: whatever is queued later, `read` does not wait for it."""
    told: list[str] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    class Event:
        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

    def pinned(*size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        told.append(f"pinned: {pin_memory}")
        return empty(*size, **options)

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        told.append(f"copy of {source.numel()}, without a wait: {non_blocking}")
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    readout = Readout(torch.tensor(1.0), torch.tensor(2.0))
    assert told == ["pinned: True", "copy of 2, without a wait: True", "record"]
    assert readout.read() == [1.0, 2.0]
    assert told[3:] == ["wait"]
