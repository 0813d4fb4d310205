"""What a run has done so far, kept on disk beside its shards, so that a killed one can be gone on with."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from megalite.data.preprocessing.encoder import CannotWrite, ColumnResult, PieceResult
from megalite.data.preprocessing.pool import WorkerDied
from megalite.data.preprocessing.shard import Extent
from megalite.errors import UserError
from megalite.folders import no_follow, open_new
from megalite.parsing import parse_json


class Ledger:
    """The folder STEM.unfinished: a header, a line for each piece that is done, and the workers' shards.

    Lines stand in the pieces' order, so that what is done is always a first part of the input. A line is
    written after its shards are on disk; one that a kill has cut off does not count. A context manager, which
    holds a lock that ends with the process, and removes the folder on a UserError but that of a dead worker,
    unless an earlier run's work is in it.

    Attributes:
        folder: for the shards.
        header: what the run was started with; empty where none was interrupted.
    """

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self.folder = f"{stem}.unfinished"
        # no suffixes: the folder may lie in one that is read as input
        self._header_path = Path(self.folder, "run")
        self._lines_path = Path(self.folder, "done")
        self.header: dict[str, Any] = {}
        self._has_earlier_work = False
        self._lock: Any = None
        self._lines: Any = None

    def __enter__(self) -> Ledger:
        try:
            if os.path.islink(self.folder):  # what lies in the folder is removed: it must be the run's own
                raise UserError(
                    f"{self.folder} is a symbolic link: remove it, or give another --output-prefix"
                )
            os.makedirs(self.folder, exist_ok=True)
            self._lock = open(Path(self.folder, "lock"), "w", opener=no_follow)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"another process is writing {self._stem}: wait for it, or stop it") from None
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror}") from None
        if self._header_path.exists():
            try:
                self.header = parse_json(self._header_path.read_text())
            except ValueError as error:
                raise UserError(
                    f"{self._header_path} is damaged ({error}): remove {self.folder}, and start again"
                ) from None
            self._has_earlier_work = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines:
            self._lines.close()
        refused = kind is not None and issubclass(kind, UserError) and not issubclass(kind, WorkerDied)
        if kind is None or (refused and not self._has_earlier_work):
            self._remove()
        self._lock.close()

    @property
    def fate(self) -> str:
        """What becomes of unfinished work when this run cannot go on, in words."""
        if self._has_earlier_work:
            return "what is done is kept, and --resume goes on"
        return "what was unfinished is removed"

    def start(self, header: dict[str, Any]) -> None:
        """Begins anew; what an earlier run has left is removed."""
        for path in Path(self.folder).iterdir():
            if path.name != "lock":
                path.unlink()
        self._has_earlier_work = False
        self.header = header
        self._lines = open_new(self._lines_path, 0)
        temporary = self._header_path.with_suffix(".tmp")
        with open_new(temporary) as stream:
            stream.write(json.dumps(header).encode())
        os.replace(temporary, self._header_path)

    def go_on(self) -> Iterator[PieceResult]:
        """The results of the interrupted run; what is appended later follows them."""
        whole = 0
        self._lines = open(self._lines_path, "r+b", buffering=0, opener=no_follow)
        with open(self._lines_path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                yield _from_json(parse_json(line))
        self._lines.truncate(whole)
        self._lines.seek(whole)

    def append(self, result: PieceResult) -> None:
        try:
            self._lines.write(json.dumps(asdict(result)).encode() + b"\n")
        except OSError as error:
            raise CannotWrite(f"cannot write {self.folder}: {error.strerror}") from None

    def _remove(self) -> None:
        """The header first: without it nothing of the rest can be taken for a run to go on with."""
        self._header_path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _from_json(fields: dict[str, Any]) -> PieceResult:
    columns = [
        ColumnResult(**{**column, "extent": _extent(column["extent"])}) for column in fields.pop("columns")
    ]
    bad = [tuple(record) for record in fields.pop("bad")]
    return PieceResult(columns=columns, bad=bad, **fields)


def _extent(values: list[Any]) -> Extent:
    return Extent(values[0], *(tuple(span) for span in values[1:]))
