"""Copies to the host's buffers and back: by value on a CPU, and the order that a GPU's streams keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megalite.utils.hardware.host_memory import HostBuffers

CPU = torch.device("cpu")


def random_bytes(number: int) -> torch.Tensor:
    return torch.randint(256, (number,), dtype=torch.uint8)


def test_copies_come_back_and_buffers_are_used_again() -> None:
    buffers = HostBuffers(CPU)
    first, second, larger = random_bytes(1000), random_bytes(1000), random_bytes(3000)
    kept = [buffers.copy_to_host(each) for each in (first, second, larger)]
    assert buffers.num_bytes == 5000
    assert all(
        buffers.copy_to_device(buffer).equal(each)
        for buffer, each in zip(kept, (first, second, larger), strict=True)
    )
    again = buffers.copy_to_host(second)
    assert again in kept and buffers.num_bytes == 5000
    assert buffers.copy_to_device(again).equal(second)
    assert (buffers.copied_down, buffers.copied_up) == (6000, 6000)


def test_the_meta_device_is_counted_without_memory() -> None:
    buffers = HostBuffers(torch.device("meta"))
    buffer = buffers.copy_to_host(torch.empty(1 << 50, dtype=torch.uint8, device="meta"))
    assert buffers.num_bytes == 1 << 50
    assert buffer.memory.numel() == 0
    assert buffers.copy_to_device(buffer).numel() == 1 << 50


class Stream:
    """Record what a stream is told, instead of a GPU's."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.events.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events.append(f"{self.name} records")
        return f"{self.name}'s event {self.events.count(f'{self.name} records')}"


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    down, up, compute = (Stream(name, events) for name in ("down", "up", "compute"))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"copy on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    held = lambda tensor, stream: events.append(f"memory held for {stream.name}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", held)
    buffers, source = HostBuffers(CPU), random_bytes(100)
    buffers._down, buffers._up = down, up  # type: ignore[assignment]
    buffer = buffers.copy_to_host(source)
    buffers.wait(buffers.mark_copied())
    assert events[:2] == ["down waits for compute", "copy on down"]
    assert events[2:] == ["down records", "compute waits for down's event 1"]
    events.clear()
    found = buffers.copy_to_device(buffer)
    buffers.wait(buffers.mark_arrived())
    assert found.equal(source)
    assert events[:3] == ["up waits for compute", "copy on up", "memory held for up"]
    assert events[3:] == [
        "up records",
        "up records",
        "compute waits for up's event 2",
    ]  # the read's end first
    events.clear()
    assert buffers.copy_to_host(source) is buffer
    assert events == ["down waits for compute", "down waits for up's event 1", "copy on down"]
    events.clear()
    buffers.keep_for_copies(source)
    assert events == ["memory held for down"]
