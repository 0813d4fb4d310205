#!/usr/bin/env python
"""Writes one self-contained HTML page of a run, or of several over each other.

python tools/report.py runs/quickstart
python tools/report.py runs/a runs/b --x tokens -o compare.html

RUN is a run's folder or the file of its --metrics-file; beside the figures it finds the checkpoints, the
config, a pipeline trace and logs. Where there is no metrics file TensorBoard's files are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, local_path
from megalite.errors import UserError
from megalite.reporting.page import MAX_RUNS, page
from megalite.reporting.panels import X_NAMES
from megalite.reporting.run import open_run


def main(arguments: Sequence[str]) -> None:
    """Reads the flags, writes the page and says where."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("runs", type=local_path, nargs="+", metavar="RUN", help="folder or metrics file")
    add(
        "--output",
        "-o",
        type=local_path,
        metavar="FILE",
        help="by default report.html in the run's folder, or here for several",
    )
    add("--x", choices=tuple(X_NAMES), default="iteration", help="what the curves are drawn over")
    add(
        "--trace",
        type=local_path,
        metavar="FILE",
        help="pipeline trace of the first run, if not the one in its folder",
    )
    add(
        "--log",
        type=local_path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="logs of the first run outside of its folder",
    )
    flags = parser.parse_args(arguments)
    if len(flags.runs) > MAX_RUNS:
        raise UserError(f"{len(flags.runs)} runs: give {MAX_RUNS} at most, since more cannot be told apart")
    first = open_run(flags.runs[0], trace=flags.trace, logs=tuple(flags.log))
    runs = [first, *map(open_run, flags.runs[1:])]
    output = flags.output or _output(flags.runs)
    if output.exists() and any(output.samefile(run.source) for run in runs):
        raise UserError(f"--output {output} is the run's own metrics file: give another file")
    text = page(runs, flags.x)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}): give another file"
        ) from None
    print(output)


def _output(runs: Sequence[Path]) -> Path:
    folder = Path() if len(runs) > 1 else runs[0] if runs[0].is_dir() else runs[0].parent
    return folder / "report.html"


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
