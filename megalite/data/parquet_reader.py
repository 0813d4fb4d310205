"""Parquet files as rows, a range of row groups at a time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from megalite.errors import UserError

_BATCH_ROWS = 256


def row_group_sizes(path: str) -> list[int]:
    """The number of rows of each row group, from the file's footer.

    Raises:
        UserError: the file is none, or the library is not installed.
    """
    parquet, arrow_error = _import_pyarrow(path)
    try:
        metadata = parquet.ParquetFile(path).metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except arrow_error as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None


def read_rows(
    path: str, keys: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of all row groups, or of those given, with the columns that the keys name.

    Args:
        path: the file.
        keys: columns, or dotted paths whose first part is a column of structs.
        groups: numbers of row groups, from 0.

    Raises:
        UserError: the file cannot be read or lacks a column, or the library is not installed.
    """
    parquet, arrow_error = _import_pyarrow(path)
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [key if key in names else key.split(".")[0] for key in keys]
        missing = [key for key, column in zip(keys, columns, strict=True) if column not in names]
        if missing:
            raise UserError(f"{path} has no column {missing[0]!r}, but {', '.join(names)}")
        wanted = sorted(set(columns), key=columns.index)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, row_groups=groups):
            yield from batch.to_pylist()
    except arrow_error as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None


def _import_pyarrow(path: str) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow").ArrowException
    except ImportError:
        raise UserError(
            f"reading {path} needs a package that is not installed: pip install pyarrow"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
