"""Record finished pieces on disk, beside their shards, so that a killed run can resume."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.data.preprocessing.encoder import CannotWrite, ColumnResult, PieceResult
from megalite.data.preprocessing.pool import WorkerDied
from megalite.data.preprocessing.shards import Extent
from megalite.utils.errors import UserError
from megalite.utils.files import no_follow, open_new, parse_json, replace_file


class Ledger:
    """Folder STEM.unfinished: a header, a line for each finished piece, and workers' shards.

    Lines are in the pieces' order, so the finished pieces are always the start of the input. A line is
    written after its shards are on disk; a line that a kill has cut off does not count. As a context manager,
    it holds a lock that the system releases when the process ends, and removes the folder on success and on a
    UserError. It keeps the folder if a worker died, or if the folder holds an earlier run's work.

    Attributes:
        folder: folder of the shards.
        header: settings of the interrupted run; empty if no run was interrupted.
    """

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self.folder = f"{stem}.unfinished"
        # Without suffixes, because the folder may be inside an input folder.
        self._header_path = Path(self.folder, "run")
        self._lines_path = Path(self.folder, "done")
        self.header: dict[str, Any] = {}
        self._has_earlier_work = False
        self._lock: Any = None
        self._lines: Any = None

    def __enter__(self) -> Ledger:
        try:
            if os.path.islink(self.folder):  # the folder's files are removed, so it must be this run's own
                raise UserError(
                    f"{self.folder} is a symbolic link: remove it, or pass another --output-prefix"
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
                    f"{self._header_path} is damaged ({error}): remove {self.folder} and start again"
                ) from None
            self._has_earlier_work = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lines:
            self._lines.close()
        refused = kind is not None and issubclass(kind, UserError) and not issubclass(kind, WorkerDied)
        if kind is None or (refused and not self._has_earlier_work):
            self._remove()
        self._lock.close()

    @property
    def on_failure(self) -> str:
        """Describe what happens to unfinished work if this run fails, for the error message."""
        if self._has_earlier_work:
            return "finished pieces are kept: continue with --resume"
        return "the unfinished output is removed"

    def start(self, header: dict[str, Any]) -> None:
        """Start a new run; remove an earlier run's files."""
        try:
            for path in Path(self.folder).iterdir():
                if path.name != "lock":
                    path.unlink()
            self._has_earlier_work = False
            self.header = header
            self._lines = open_new(self._lines_path, 0)
            with replace_file(self._header_path) as stream:
                stream.write(json.dumps(header).encode())
        except OSError as error:
            raise CannotWrite(f"cannot write {self.folder}: {error.strerror}") from None

    def resume(self) -> Iterator[PieceResult]:
        """Yield the results of the interrupted run; `append` continues after them."""
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
        self._header_path.unlink(missing_ok=True)  # first, because no run can resume without it
        shutil.rmtree(self.folder, ignore_errors=True)


def _from_json(fields: dict[str, Any]) -> PieceResult:
    columns = []
    for column in fields.pop("columns"):
        shard, *spans = column.pop("extent")
        columns.append(ColumnResult(Extent(shard, *map(tuple, spans)), **column))
    bad = [tuple(record) for record in fields.pop("bad")]
    return PieceResult(columns=columns, bad=bad, **fields)
