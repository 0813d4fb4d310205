"""A copy of tensors in host memory, so that training may go on while they are written."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from megalite.checkpoint.tensor_writer import Piece

_ALIGNMENT = 64


class HostCopy:
    """Memory of the host for one copy of a rank's share, used again for each save.

    The copy is made while training computes the next gradients, which leave the tensors alone: training
    calls `protect` before it writes to them, and stands still there for what is left of the copy. The first
    one takes the memory; later ones take none unless there is more to copy.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._filled = threading.Event()

    def take(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Begins a copy of the pieces; it is there once `fill` returns, and valid until the next call."""
        starts, size = _layout(pieces)
        if size > self._memory.numel():
            if self._stream:
                _unpin(self._memory)
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory goes first
            self._memory = _pinned(_fresh(size)) if self._stream else _fresh(size)
        copies = {name: self._at(starts[name], piece.tensor) for name, piece in pieces.items()}
        self._pairs = [(copies[name], piece.tensor.detach().contiguous()) for name, piece in pieces.items()]
        self._filled.clear()
        if self._stream is not None:
            self._copy_aside(self._stream)
        return {name: Piece(copies[name], piece.place) for name, piece in pieces.items()}

    def fill(self) -> None:
        """Makes the copy, or waits for the GPU that does; any thread may call it."""
        try:
            if self._done is not None:
                torch.cuda.set_device(
                    self._device
                )  # a new thread's is GPU 0: a context there takes its memory
                self._done.synchronize()
            else:
                for copy, tensor in self._pairs:
                    # One thread, where torch takes as many as training, whose cores they are.
                    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.numel() * copy.element_size())
            self._pairs = []
        finally:
            self._filled.set()

    def protect(self) -> None:
        """Keeps what comes next from writing to tensors that are still to be copied.

        The host waits for itself alone: on a GPU later kernels wait for the copies.
        """
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        else:
            self._filled.wait()

    def _at(self, start: int, like: Tensor) -> Tensor:
        content = self._memory[start : start + like.numel() * like.element_size()]
        return content.view(like.dtype).view(like.shape)

    @torch.no_grad()
    def _copy_aside(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for copy, tensor in self._pairs:
                copy.copy_(tensor, non_blocking=True)
            self._done = stream.record_event()


def _layout(pieces: Mapping[str, Piece]) -> tuple[dict[str, int], int]:
    """Where each piece starts, in bytes, and the size of all."""
    starts: dict[str, int] = {}
    size = 0
    for name, piece in pieces.items():
        starts[name] = size
        size += -(-piece.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return starts, size


def _fresh(size: int) -> Tensor:
    """Memory of its own, which goes back to the system when nothing uses it any more.

    Large pages make its first use four times faster, where the system has them.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned(memory: Tensor) -> Tensor:
    """The memory, which a GPU may now read and write by itself.

    torch's own pinned memory comes in sizes of powers of two: up to half of it would lie idle.
    """
    if memory.numel() > 0:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
    return memory


def _unpin(memory: Tensor) -> None:
    """Takes back what `_pinned` told CUDA: other memory may come to lie at that address."""
    if memory.numel() > 0:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
