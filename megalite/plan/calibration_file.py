"""Write the measured rates of a machine to a file, and read them back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

from megalite.hardware.gpus import Gpu
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError, first_line
from megalite.utils.files import parse_json, read_regular, replace_file

_MAX_BYTES = 100_000


def write_calibration(file: str, gpu: Gpu) -> None:
    """Write the figures as a JSON object.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with replace_file(file) as stream:
            stream.write(json.dumps(asdict(gpu), indent=2).encode())
    except OSError as error:
        raise UserError(f"--calibration {file} cannot be written ({error.strerror}): pass another") from None


def read_calibration(file: str) -> Gpu:
    """Return the figures of a file that `write_calibration` wrote.

    Raises:
        UserError: the file cannot be read, or its figures are not all positive numbers.
    """
    write = f"{command_name('plan')} --calibrate --calibration {file} writes it"
    try:
        figures = parse_json(read_regular(Path(file), _MAX_BYTES, follow=True))
        kinds = get_type_hints(Gpu)
        if not isinstance(figures, dict) or figures.keys() != kinds.keys():
            raise ValueError("it does not have the figures of a GPU")
        for name, figure in figures.items():
            allowed = (int, float) if kinds[name] is float else (kinds[name],)
            if type(figure) not in allowed or not (kinds[name] is bool or 0 < figure < float("inf")):
                raise ValueError(f"{name} is {figure!r}")
        return Gpu(**figures)
    except OSError as error:
        raise UserError(f"--calibration {file} cannot be read ({error.strerror}): {write}") from None
    except ValueError as error:
        raise UserError(f"--calibration {file} is damaged ({first_line(error)}): {write}") from None
