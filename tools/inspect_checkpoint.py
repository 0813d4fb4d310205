#!/usr/bin/env python
"""Says what a checkpoint holds, whether it is whole, and in what it differs from another.

python tools/inspect_checkpoint.py CHECKPOINTS
python tools/inspect_checkpoint.py CHECKPOINTS --load-iteration 100 --verify --norms
python tools/inspect_checkpoint.py CHECKPOINTS/iter_0000100 --diff OTHER/iter_0000100

FOLDER is a run's folder of checkpoints, one checkpoint, or a Hugging Face folder. Exit status 1 where it is
damaged, or where --diff finds that the two are of another progress, model or run or have other tensors; the
layout and the versions that saved them make no difference.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, local_path
from megalite.errors import UserError
from megalite.inspection import difference
from megalite.inspection.inspect import inspect, lines_of
from megalite.inspection.view import open_view


def main(arguments: Sequence[str]) -> None:
    """Reads the flags, prints what they ask for, and exits by the verdict."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=local_path, metavar="FOLDER", help="what to look at")
    add("--load-iteration", type=int, metavar="N", help="of a run's folder; by default its latest")
    add("--verify", action="store_true", help="read every byte and compare it with SHA256SUMS")
    add("--norms", action="store_true", help="norm, extremes, NaN and infinities of each tensor")
    add("--json", action="store_true", help="print one JSON object")
    add("--diff", type=local_path, metavar="OTHER", help="say in what it differs from this folder's")
    flags = parser.parse_args(arguments)
    sys.exit(0 if (_difference(flags) if flags.diff else _report(flags)) else 1)


def _report(flags: argparse.Namespace) -> bool:
    """Prints one checkpoint; returns whether it is whole."""
    report = inspect(open_view(flags.folder, flags.load_iteration), verify=flags.verify, norms=flags.norms)
    print(json.dumps(report.record()) if flags.json else "\n".join(lines_of(report)))
    return not report.damage


def _difference(flags: argparse.Namespace) -> bool:
    """Prints the difference of two; returns whether there is none that counts."""
    if flags.verify or flags.norms:
        raise UserError("--verify and --norms look at one checkpoint: leave them out with --diff")
    views = [open_view(folder, flags.load_iteration) for folder in (flags.folder, flags.diff)]
    comparison = difference.compare(*views)
    print(json.dumps(comparison.record()) if flags.json else "\n".join(difference.lines_of(comparison)))
    return comparison.is_equal


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without a word
    run_main(main, sys.argv[1:])
