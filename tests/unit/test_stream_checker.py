"""What the checker of stream orders accepts and reports, one primitive at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.stream_checker import StreamChecker, StreamOrderError

DEVICE = StreamChecker.device


def new() -> Tensor:
    return torch.ones(4, device=DEVICE)


def pinned() -> Tensor:
    return torch.zeros(4, pin_memory=True)


def side_write(x: Tensor, *, waits: bool = True) -> torch.cuda.Stream:
    """Write on another stream, after the current one."""
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1.0)
    return side


def stream_waits() -> None:
    x = new()
    torch.cuda.current_stream().wait_stream(side_write(x))
    x.mul_(2.0)


def stream_does_not_wait() -> None:
    x = new()
    side_write(x)
    x.mul_(2.0)


def side_does_not_wait() -> None:
    x = new()
    torch.cuda.current_stream().wait_stream(side_write(x, waits=False))


def event_of_earlier_work() -> None:
    x = new()
    side = torch.cuda.Stream()
    event = side.record_event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1.0)
    event.wait()
    x.mul_(2.0)


def event_of_that_work() -> None:
    x = new()
    torch.cuda.current_stream().wait_event(side_write(x).record_event())
    x.mul_(2.0)


def both_read() -> None:
    x = new()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1.0
    z = x + 2.0
    torch.cuda.current_stream().wait_stream(side)
    z.add_(y)
    y.record_stream(torch.cuda.current_stream())


def other_bytes() -> None:
    x = new()
    side = side_write(x[:2])
    x[2:].mul_(2.0)
    torch.cuda.current_stream().wait_stream(side)


def some_bytes() -> None:
    x = new()
    side = side_write(x[:3])
    x[2:].mul_(2.0)
    torch.cuda.current_stream().wait_stream(side)


def host_waits() -> None:
    target = pinned().copy_(new(), non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    assert target.tolist() == [1.0] * 4


def host_does_not_wait() -> None:
    pinned().copy_(new(), non_blocking=True).tolist()


def host_overwrites() -> None:
    source = pinned()
    new().copy_(source, non_blocking=True)
    source.fill_(2.0)


def copy_blocks() -> None:
    source = pinned()
    new().copy_(source)
    source.fill_(2.0)
    torch.zeros(4).copy_(new(), non_blocking=True).tolist()  # pageable memory


def freed_early() -> None:
    x = new()
    side = side_write(x)
    del x
    torch.cuda.current_stream().wait_stream(side)


def freed_in_order() -> None:
    x = new()
    torch.cuda.current_stream().wait_stream(side_write(x))
    del x


def resized() -> None:
    x = new()
    torch.cuda.current_stream().wait_stream(side_write(x))
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(x.nbytes)
    x.fill_(1.0)


def resized_early() -> None:
    x = new()
    side = side_write(x)
    x.untyped_storage().resize_(0)
    torch.cuda.current_stream().wait_stream(side)


def resized_on_another_stream() -> None:
    x = new()
    x.untyped_storage().resize_(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        x.untyped_storage().resize_(x.nbytes)
    x.fill_(1.0)
    del x


def recorded() -> None:
    x = new()
    x.record_stream(side_write(x))
    del x


def other_thread_is_joined() -> None:
    target = pinned().copy_(new(), non_blocking=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.cuda.synchronize).result()
    target.tolist()


ORDERED = (
    *(stream_waits, event_of_that_work, both_read, other_bytes, host_waits, copy_blocks, freed_in_order),
    *(resized, recorded, other_thread_is_joined),
)
AFTER_SIDE = "written by mul_ on the default stream .* until they are written by add_ on stream 1"
RACES = {
    stream_does_not_wait: AFTER_SIDE,
    side_does_not_wait: "written by add_ on stream 1 .* until they are written by ones on the default stream",
    event_of_earlier_work: AFTER_SIDE,
    some_bytes: AFTER_SIDE,
    host_does_not_wait: "read by tolist on host thread MainThread .* until they are written by copy_",
    host_overwrites: "written by fill_ on host thread MainThread .* until they are read by copy_",
    resized_early: "are freed at .* but are still written by add_ on stream 1",
    resized_on_another_stream: "return to stream 1 .* but are still written by fill_ on the default stream",
    freed_early: "are freed at .* but are still written by add_ on stream 1",
}


@pytest.mark.parametrize("program", ORDERED)
def test_an_order_is_accepted(program: Callable[[], None]) -> None:
    with StreamChecker() as checker:
        program()
    assert checker.report().startswith("the default stream: ")


@pytest.mark.parametrize("program", RACES)
def test_a_missing_order_is_one_line(program: Callable[[], None]) -> None:
    with pytest.raises(StreamOrderError, match=RACES[program]) as found, StreamChecker():
        program()
    (line,) = str(found.value).splitlines()
    assert line.count("tests/unit/test_stream_checker.py:") >= 2


def used_without_memory() -> None:
    x = new()
    x.untyped_storage().resize_(0)
    x.view(2, 2).add_(1.0)


def test_freed_memory_cannot_be_used() -> None:
    message = r"^aten.add_.* uses memory freed at tests/unit/test_stream_checker.py:\d+$"
    with pytest.raises(StreamOrderError, match=message), StreamChecker():
        used_without_memory()


def test_an_error_of_the_program_comes_first() -> None:
    def program() -> None:
        stream_does_not_wait()
        raise KeyError

    with pytest.raises(KeyError), StreamChecker():
        program()


def test_nothing_poses_after_the_block() -> None:
    with StreamChecker():
        x = new()
        assert x.is_cuda and x.device == DEVICE and not x.is_pinned() and pinned().is_pinned()
        assert x.cpu().device.type == "cpu" and x.cpu().to(DEVICE).is_cuda and x.new_zeros(2).is_cuda
    assert x.device.type == "cpu" and not x.is_cuda
