"""Copy tensors to host memory while training goes on, to save them in the background."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.checkpoint.tensor_files import FilePiece
from megalite.utils.hardware.host_memory import allocate_bytes, pin

_ALIGNMENT = 64


class HostCopy:
    """Copy of a rank's pieces in host memory, which is reused for each save.

    The copy runs while training computes the next gradients, which does not change the tensors. Training
    calls `protect` before it writes to them, and waits there for the rest of the copy. The first copy
    allocates the memory; later copies allocate only if they need more.

    Args:
        device: device of the tensors; some of them can be in host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._filled = threading.Event()

    def take(self, pieces: Mapping[str, FilePiece]) -> dict[str, FilePiece]:
        """Start a copy of the pieces; it is complete once `fill` returns, and valid until the next call."""
        starts, size = dict[str, int](), 0  # in bytes
        for name, piece in pieces.items():
            starts[name] = size
            size += -(-piece.num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            self._pairs = []  # free the old memory first
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = allocate_bytes(size)
            if self._stream is not None:
                pin(self._memory)
        copies = {name: self._at(starts[name], piece.tensor) for name, piece in pieces.items()}
        pairs = [(copies[name], piece.tensor.detach().contiguous()) for name, piece in pieces.items()]
        self._pairs = [pair for pair in pairs if pair[1].device.type == "cpu"]
        self._filled.clear()
        if self._stream is not None:
            self._copy_on(self._stream, [pair for pair in pairs if pair[1].device.type != "cpu"])
        return {name: FilePiece(copies[name], piece.range) for name, piece in pieces.items()}

    def fill(self) -> None:
        """Copy the pieces, or wait until the GPU has copied them; any thread can call this."""
        try:
            for copy, tensor in self._pairs:
                # Copy in one thread: torch would use as many threads as training, and compete for its cores.
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.numel() * copy.element_size())
            self._pairs = []
        finally:
            self._filled.set()
        if self._done is not None:
            # The default device of a new thread is GPU 0, on which a context would occupy memory.
            torch.cuda.set_device(self._device)
            self._done.synchronize()

    def protect(self) -> None:
        """Keep later work from writing to tensors before they have been copied.

        The host waits only for the copy of tensors in host memory. On a GPU, later kernels wait for the
        copies.
        """
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._filled.wait()

    def _at(self, start: int, like: Tensor) -> Tensor:
        content = self._memory[start : start + like.numel() * like.element_size()]
        return content.view(like.dtype).view(like.shape)

    @torch.no_grad()
    def _copy_on(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # a temporary's memory is not reused before the copy has run
            self._done = stream.record_event()
