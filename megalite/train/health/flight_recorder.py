"""Dump torch.distributed's flight recorder: the last collectives of a rank, to analyze a hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megalite.files import no_follow
from megalite.torch_private import flight_recorder

PREFIX = "flight_recorder_"
"""Prefix of a file's name: torchfrtrace needs a prefix, and the rank at the end."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Names of torch's environment variable for the number of records: 2000 by default, 0 turns it off."""


def recorder_of(device_type: str) -> Callable[..., bytes] | None:
    """Return the function that dumps the records; None if torch lacks it, or the user has turned it off."""
    if any(os.environ.get(name) == "0" for name in _SIZES):
        return None
    return flight_recorder(device_type)


def analysis_of(folder: Path, device_type: str) -> str:
    """Return the command that reads the files in a folder. torchfrtrace cannot match gloo's records."""
    if device_type == "cuda":
        return f"torchfrtrace {folder} --prefix {PREFIX} --allow-incomplete-ranks"
    return f"python -m pickle {folder}/{PREFIX}*"


def write_records(path: Path, dump: Callable[..., bytes]) -> None:
    """Write the records to a file; create its folder.

    Stacks are not included: to look up their source lines can take torch more than ten seconds.
    """
    records = dump(includeStackTraces=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb", opener=no_follow) as file:
        file.write(records)
