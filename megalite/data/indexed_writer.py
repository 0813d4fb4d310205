"""Writer of indexed datasets."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION
from megalite.errors import UserError
from megalite.folders import open_new

_SMALL_VOCAB_SIZE = 65500
_MAX_LENGTH = 2**31 - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that a vocabulary's tokens are written in: uint16 where it is small, else int32."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCAB_SIZE else "<i4")


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx; nothing stands under these names until both are whole.

    A context manager: leaving it commits, leaving it by an exception discards. The .idx is put in place last,
    so that a dataset with an .idx is complete.

    Raises:
        UserError: the folder cannot be written, the files exist, or a token or a length does not fit.
    """

    def __init__(self, prefix: str, dtype: npt.DTypeLike, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = {name: code for code, name in DTYPE_CODES.items()}[self.dtype.name]
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self.num_tokens = 0
        existing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if os.path.exists(name)]
        if existing and not overwrite:
            raise UserError(f"{existing[0]} exists: give another output prefix, or --overwrite")
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._bin = open_new(self._temporary("bin"), 1 << 20)
        except OSError as error:
            raise UserError(f"cannot write {prefix}.bin: {error.strerror}") from None

    @property
    def num_documents(self) -> int:
        return len(self._document_ends) - 1

    def add_document(self, sequences: Sequence[npt.ArrayLike]) -> None:
        """Appends one document of any number of sequences, also none."""
        parts = [np.asarray(sequence) for sequence in sequences]
        for part in parts:
            self._append(part, np.array([part.size]))
        self._document_ends.append(len(self._lengths))

    def add_documents(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Appends many documents of one sequence each: their tokens back to back, and their lengths."""
        first = len(self._lengths) + 1
        self._append(tokens, lengths)
        self._document_ends.extend(range(first, len(self._lengths) + 1))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as failure:
            raise UserError(f"cannot write {self.prefix}.bin and .idx: {failure.strerror}") from None
        finally:
            self._discard()

    def _append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        assert int(lengths.sum()) == tokens.size, "lengths must sum to the number of tokens"
        assert not tokens.size or tokens.dtype.kind in "iu", "tokens must be integers"
        if lengths.size and int(lengths.max()) > _MAX_LENGTH:
            raise UserError(f"a sequence of {int(lengths.max())} tokens is too long: at most {_MAX_LENGTH}")
        if tokens.dtype != self.dtype and tokens.size:
            limits, low, high = np.iinfo(self.dtype), int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise UserError(
                    f"token id {wrong} does not fit into {self.dtype.name}, the type of {self.prefix}.bin"
                )
        try:
            self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise UserError(f"cannot write {self.prefix}.bin: {error.strerror}") from None
        self._lengths.extend(lengths.tolist())
        self.num_tokens += tokens.size

    def _commit(self) -> None:
        _close_durably(self._bin)
        with open_new(self._temporary("idx")) as stream:
            self._write_index(stream)
            _close_durably(stream)
        if os.path.exists(f"{self.prefix}.idx"):
            os.remove(f"{self.prefix}.idx")  # a new .bin must never be read through an old .idx
        os.replace(self._temporary("bin"), f"{self.prefix}.bin")
        os.replace(self._temporary("idx"), f"{self.prefix}.idx")

    def _write_index(self, stream: Any) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=offsets[1:])
        offsets *= self.dtype.itemsize
        documents = np.frombuffer(self._document_ends, np.int64)
        stream.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
        for values, kind in ((lengths, "<i4"), (offsets, "<i8"), (documents, "<i8")):
            stream.write(values.astype(kind, copy=False).tobytes())

    def _discard(self) -> None:
        self._bin.close()
        for extension in ("bin", "idx"):
            if os.path.exists(self._temporary(extension)):
                os.remove(self._temporary(extension))

    def _temporary(self, extension: str) -> str:
        return f"{self.prefix}.{extension}.{os.getpid()}.tmp"


def _close_durably(stream: Any) -> None:
    """Closes a file once its bytes are on disk: a rename must not become visible before them."""
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()
