"""Copies to host memory on a side stream, recorded without a GPU: meta tensors stand for its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import saver
from megalite.checkpoint.saver import HostCopy
from megalite.checkpoint.tensor_files import FilePiece


class SideStream:
    """Stands for the stream of the copies."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> str:
        return "event"


def test_the_allocator_keeps_each_source_until_its_copy_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may be a temporary, such as rounded weights: the side stream reads it after `take` returns."""
    queued: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(saver, "pin", lambda memory: None)
    monkeypatch.setattr(
        Tensor, "copy_", lambda self, source, non_blocking: queued.append(("copy", source.numel()))
    )
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: queued.append(("kept", self.numel())))
    copy = HostCopy(torch.device("cpu"))
    monkeypatch.setattr(copy, "_stream", SideStream())
    weight = torch.empty(6, 4, device="meta", dtype=torch.bfloat16)
    copy.take({"rounded": FilePiece(weight[:, 0], None), "whole": FilePiece(weight, None)})
    assert queued == [("copy", 6), ("kept", 6), ("copy", 24), ("kept", 24)]
