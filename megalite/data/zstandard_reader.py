"""Zstandard files as byte streams."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from megalite.errors import UserError

_CHUNK = 1 << 17


def open_zstandard(compressed: BinaryIO) -> BinaryIO:
    """The decompressed bytes of an open file of one or more frames.

    Reading raises OSError where the file is damaged and EOFError where it is cut off, as gzip's reader does;
    the library's own stream ends silently there.

    Raises:
        UserError: the library is not installed.
    """
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise UserError(
            f"reading {compressed.name} needs a package that is not installed: pip install zstandard"
        ) from None
    return cast(BinaryIO, io.BufferedReader(_ChunkStream(_decompress(compressed, zstandard)), _CHUNK))


def _decompress(compressed: BinaryIO, zstandard: Any) -> Iterator[bytes]:
    frame = None
    while data := compressed.read(_CHUNK):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends in the middle of its compressed data")


class _ChunkStream(io.RawIOBase):
    """A raw stream of chunks of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
