"""Record where each document of a corpus comes from, in PREFIX.sources.

The file begins with a line of JSON, the names of the input files. Then follows a `SOURCE` for each document,
in the order of the corpus.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.data.preprocessing.input_plan import ByteRange
from megalite.data.sharded_dataset import LIST_SUFFIX
from megalite.utils.errors import UserError
from megalite.utils.files import open_regular, parse_json, replace_file

SOURCE = np.dtype([("file", "<u4"), ("begin", "<u8"), ("number", "<u8")])
"""Number of the file, a position in it in bytes, and the number of the line or row from 1, counted from the
first line that starts there."""


def write_sources(prefix: str, files: Sequence[str], parts: Sequence[Path]) -> None:
    """Write PREFIX.sources from the files of its shards.

    Raises:
        OSError: it cannot be written.
    """
    with replace_file(f"{prefix}.sources") as stream:
        stream.write(f"{json.dumps(files)}\n".encode())
        for part in parts:
            with open(part, "rb") as records:
                shutil.copyfileobj(records, stream, 1 << 20)


def find_source(prefix: str, document: int) -> str:
    """Return the input file and line of a document; empty for a corpus without PREFIX.sources.

    Raises:
        UserError: the file is damaged.
    """
    path = Path(f"{prefix.removesuffix(LIST_SUFFIX)}.sources")
    if not path.is_file():
        return ""
    with open_regular(path, follow=True) as stream, open(stream.fileno(), "rb", closefd=False) as lines:
        header = lines.readline()
        lines.seek(len(header) + document * SOURCE.itemsize)
        record = np.frombuffer(lines.read(SOURCE.itemsize), SOURCE)
    try:
        file = str(parse_json(header)[int(record["file"][0])])
        begin, number = int(record["begin"][0]), int(record["number"][0])
    except (ValueError, IndexError):
        raise UserError(f"{path} is damaged: prepare the corpus again, or delete the file") from None
    if begin:
        try:
            number = ByteRange(file, begin, sys.maxsize).locate(number)
        except UserError:
            return f"{file} line {number} after byte {begin}"
    return f"{file} line {number}"
