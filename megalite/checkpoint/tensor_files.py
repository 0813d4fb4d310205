"""Write tensor files in the safetensors format, with a digest, and read slices of them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from megalite.checkpoint.manifest import (
    BLOCK_BYTES,
    FileRecord,
    Manifest,
    TensorBytes,
    TensorRecord,
    dtype_name,
    dtype_of,
)
from megalite.checkpoint.parameter_range import ParameterRange, Tensors, are_disjoint, elements_of
from megalite.distributed.topology import Topology
from megalite.utils.files import file_system_of

_BUFFER_BYTES = 16 << 20
_LOCAL_FILE_SYSTEMS = ("ext4", "xfs")


class DiskFile:
    """New file whose bytes are on disk when `finish` returns.

    On a local disk, bytes are written directly from a buffer of the process (`O_DIRECT`), without the page
    cache. With the page cache, a sync after 1 GB takes two to three times as long. On other file systems
    (network file systems do this better themselves) bytes go through the page cache, and `posix_fadvise`
    starts writing early.

    Raises:
        OSError: the constructor or a method cannot write the file; a partial file remains.
    """

    def __init__(self, file: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(file, flags, 0o666)
        self._buffer: mmap.mmap | None = None
        self._num_buffered = 0
        self._num_written = 0
        if file_system_of(self._descriptor) in _LOCAL_FILE_SYSTEMS and self._set_direct(True):
            self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # page-aligned, as O_DIRECT requires

    def write(self, content: memoryview) -> None:
        """Append bytes; the caller can overwrite the memory afterwards."""
        if self._buffer is None:
            self._put(content)
            return
        while len(content):
            part = content[: _BUFFER_BYTES - self._num_buffered]
            self._buffer[self._num_buffered : self._num_buffered + len(part)] = part
            self._num_buffered += len(part)
            content = content[len(part) :]
            if self._num_buffered == _BUFFER_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write the rest, and wait until all of it is on disk."""
        if self._buffer is not None:
            self._set_direct(False)  # the rest is not a whole number of disk blocks
            self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; without `finish` it is incomplete."""
        os.close(self._descriptor)
        self._buffer = None  # do not close it: an error that is being raised may hold a view of it

    def _flush(self) -> None:
        assert self._buffer is not None
        with memoryview(self._buffer) as whole, whole[: self._num_buffered] as content:
            try:
                self._put(content)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._set_direct(False)  # the disk has an unusual block size
                self._put(content[self._num_written % _BUFFER_BYTES :])
        self._num_buffered = 0

    def _put(self, content: memoryview) -> None:
        while len(content):
            written = os.write(self._descriptor, content)
            if self._buffer is None:
                self._start_writing_out(written)
            self._num_written += written
            content = content[written:]

    def _start_writing_out(self, num_bytes: int) -> None:
        """Start to write the bytes so far to the disk, if the system supports it, to shorten the sync.

        Linux starts to write out pages that are advised as no longer needed, and keeps them until they are
        written.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._num_written, num_bytes, os.POSIX_FADV_DONTNEED)

    def _set_direct(self, is_direct: bool) -> bool:
        """Turn direct writing on or off; return whether the file system supports it."""
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct if is_direct else flags & ~direct)
        except OSError:
            return False
        return bool(direct)


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
"""Names of torch dtypes in safetensors."""


@dataclass(frozen=True)
class FilePiece:
    """Part of a tensor in one file.

    Attributes:
        tensor: elements, in the shape that the file records.
        range: range of the elements in the full tensor; None if they are a whole plain tensor.
    """

    tensor: Tensor
    range: ParameterRange | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def write_file(file: Path, pieces: Mapping[str, FilePiece], *, has_blocks: bool = False) -> FileRecord:
    """Write pieces to a new file; it is on disk when this returns.

    Args:
        pieces: pieces by name, in host memory; a tensor that is not contiguous is copied.
        has_blocks: whether to record digests of the file's blocks too, which takes another core as long.

    Raises:
        OSError: the file cannot be written; a partial file remains.
    """
    order = sorted(pieces, key=lambda name: (-pieces[name].tensor.element_size(), name))  # keeps alignment
    ranges = {name: pieces[name].range for name in order}
    header = safetensors_header(
        [(name, pieces[name].tensor.dtype, tuple(pieces[name].tensor.shape)) for name in order],
        {name: json.dumps(each.record()) for name, each in ranges.items() if each is not None},
    )
    chunks = [memoryview(header)]
    for name in order:
        chunks += _chunks(pieces[name].tensor)
    sizes = [sys.maxsize, BLOCK_BYTES] if has_blocks else [sys.maxsize]
    hashings = [_Hashing(chunks, size) for size in sizes]
    try:
        target = DiskFile(file)
        try:
            for chunk in chunks:
                target.write(chunk)
            target.finish()
        finally:
            target.close()
    except BaseException:
        for hashing in hashings:
            hashing.stop()
        raise
    records = {
        name: TensorRecord(file.name, dtype_name(piece.tensor.dtype), piece.range)
        for name, piece in pieces.items()
    }
    (sha256,), *blocks = [hashing.digests() for hashing in hashings]
    return FileRecord(file.name, sha256, records, *blocks)


class _Hashing:
    """SHA-256 of each block of `block_bytes` of consecutive chunks, computed in a separate thread."""

    def __init__(self, chunks: Sequence[memoryview], block_bytes: int) -> None:
        self._chunks, self._block_bytes = chunks, block_bytes
        self._digests: list[str] = []
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="hash-checkpoint", daemon=True)
        self._thread.start()

    def digests(self) -> list[str]:
        """Wait for the hexadecimal digests and return them."""
        self._thread.join()
        return self._digests

    def stop(self) -> None:
        """Stop early; the memory can be overwritten afterwards."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        digest, left = hashlib.sha256(), self._block_bytes
        for chunk in self._chunks:
            while len(chunk) and not self._is_stopped:
                if left == 0:
                    self._digests.append(digest.hexdigest())
                    digest, left = hashlib.sha256(), self._block_bytes
                part = chunk[:left]
                digest.update(part)
                left -= len(part)
                chunk = chunk[len(part) :]
        self._digests.append(digest.hexdigest())


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a safetensors file: a JSON text, after its length in 8 little-endian bytes.

    Args:
        tensors: names, dtypes and shapes, in the order in which their elements follow the header.
        metadata: metadata of the file; not written if it is empty.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape in tensors:
        end = start + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the elements
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    assert tensor.device.type == "cpu"
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]


def read_tensors(
    manifest: Manifest, tensors: Tensors, topology: Topology, sources: Mapping[str, str] | None = None
) -> None:
    """Copy this rank's elements from the files in place, opening only the files that contain them.

    Files are mapped into memory one at a time, so only the copied elements are read. Padding that is in no
    file does not change. Floating-point numbers of another dtype are rounded to the tensor's dtype.

    Args:
        sources: names in the checkpoint, for tensors whose names differ there.

    Raises:
        ValueError: a file cannot be read, a tensor has another shape or dtype, or elements are in no file.
    """
    read_targets(manifest, targets_of(tensors, topology, sources or {}))


def targets_of(tensors: Tensors, topology: Topology, sources: Mapping[str, str]) -> list[ReadTarget]:
    """Return this rank's elements as targets; see `read_tensors`."""
    return [
        ReadTarget(sources.get(name, name), elements_of(tensor), ParameterRange.of(tensor, topology))
        for name, tensor in tensors.items()
    ]


class ReadTarget:
    """Elements of a tensor that are read piece by piece.

    Args:
        elements: elements of the range, flat.
    """

    def __init__(self, name: str, elements: Tensor, target_range: ParameterRange) -> None:
        self.name, self.elements, self.range = name, elements, target_range

    def pieces(self, records: Sequence[TensorRecord]) -> list[TensorRecord]:
        """Return the pieces that have elements of the target; for copies, the first.

        Raises:
            ValueError: the pieces belong to another tensor, or elements are in no piece or in several.
        """
        distinct: dict[ParameterRange | None, TensorRecord] = {}
        for record in records:
            distinct.setdefault(record.range, record)
        if list(distinct) == [None]:
            return list(distinct.values())
        ranges = [self._checked_range(record) for record in distinct.values()]
        if not are_disjoint(ranges):
            raise ValueError(f"elements of {self.name} are in several files")
        if missing := self.range.num_used - sum(self.range.num_common(each) for each in ranges):
            raise ValueError(f"{missing} elements of {self.name} are in no file")
        return [
            record
            for each, record in zip(ranges, distinct.values(), strict=True)
            if self.range.num_common(each, with_padding=True)
        ]

    def bytes_in(self, record: TensorRecord) -> TensorBytes:
        """Return the bytes of a piece from the first element of the target to the last."""
        if record.range is None:
            return TensorBytes(self.name, 0, sys.maxsize)
        begin, end = record.range.span_of(self.range)
        itemsize = dtype_of(record.dtype).itemsize
        return TensorBytes(self.name, begin * itemsize, end * itemsize)

    @torch.no_grad()
    def copy_from(self, saved: Tensor, record: TensorRecord) -> None:
        """Copy the elements that a piece and the target share; fp64 is rounded to 16 bits through fp32.

        Raises:
            ValueError: the piece differs from its record, or belongs to another tensor.
        """
        saved_range = record.range or ParameterRange.whole(tuple(saved.shape))
        if dtype_name(saved.dtype) != record.dtype:
            raise ValueError(f"{self.name} is {dtype_name(saved.dtype)}, the index says {record.dtype}")
        self._check(record.dtype, saved_range)
        num_elements = saved_range.end - saved_range.start
        if num_elements != saved.numel():
            raise ValueError(f"{self.name} has {saved.numel()} elements, the index says {num_elements}")
        is_rounded = self.elements.dtype in (torch.bfloat16, torch.float16)
        for source, saved_values in saved_range.views(saved.reshape(-1)):
            for target, own_values in self.range.views(self.elements):
                common = source.common(target)
                values = common.within(source).of(saved_values)
                if is_rounded and saved.dtype == torch.float64:
                    values = values.float()
                common.within(target).of(own_values).copy_(values)

    def _checked_range(self, record: TensorRecord) -> ParameterRange:
        if record.range is None:
            raise ValueError(f"{record.file}: {self.name} is whole here and in pieces elsewhere")
        try:
            self._check(record.dtype, record.range)
        except ValueError as error:
            raise ValueError(f"{record.file}: {error}") from None
        return record.range

    def _check(self, dtype: str, saved: ParameterRange) -> None:
        here, mine = self.range, self.elements.dtype
        is_alike = dtype == dtype_name(mine) or (mine.is_floating_point and dtype_of(dtype).is_floating_point)
        if not is_alike or saved.full_shape != here.full_shape:
            raise ValueError(
                f"{self.name} is {dtype} {saved.full_shape}, here {dtype_name(mine)} {here.full_shape}"
            )


def read_targets(manifest: Manifest, targets: Sequence[ReadTarget]) -> None:
    """Fill the targets; raise the same errors as `read_tensors`, and those of `Download.fetch`."""
    if manifest.download is not None:
        manifest.download.fetch(manifest, bytes_of(manifest, targets))
    wanted = _pieces_by_file(manifest, targets)
    for file in sorted(wanted):
        with open_tensors(manifest, file) as handle:
            for target, record in wanted[file]:
                target.copy_from(handle.get_tensor(target.name), record)


def bytes_of(manifest: Manifest, targets: Iterable[ReadTarget]) -> dict[str, list[TensorBytes]]:
    """Return the bytes of files that the targets need, by file.

    Raises:
        ValueError: see `ReadTarget.pieces`.
    """
    return {
        file: [target.bytes_in(record) for target, record in pieces]
        for file, pieces in _pieces_by_file(manifest, targets).items()
    }


def _pieces_by_file(
    manifest: Manifest, targets: Iterable[ReadTarget]
) -> dict[str, list[tuple[ReadTarget, TensorRecord]]]:
    pieces: dict[str, list[tuple[ReadTarget, TensorRecord]]] = {}
    for target in targets:
        for record in target.pieces(manifest.tensors.get(target.name, ())):
            pieces.setdefault(record.file, []).append((target, record))
    return pieces


@contextmanager
def open_tensors(manifest: Manifest, file: str) -> Iterator[Any]:
    """Open a safetensors file, mapped into memory; tensors are read on access.

    Raises:
        ValueError: it cannot be opened, or the block finds unexpected contents; the message has the file
            name.
    """
    path = manifest.folder / file
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link")
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")  # the library would wait for the writer of a pipe
        with safetensors.safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file}: {error}") from error
