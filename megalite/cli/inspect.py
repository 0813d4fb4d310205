"""Show what a checkpoint contains, whether it is complete, and how it differs from another.

megalite inspect CHECKPOINTS
megalite inspect CHECKPOINTS --load-iteration 100 --verify --norms
megalite inspect CHECKPOINTS/iter_0000100 --diff OTHER/iter_0000100

FOLDER is a run's folder of checkpoints, one checkpoint, or a Hugging Face folder. The exit status is 1 if the
checkpoint is damaged, or if --diff finds a difference in progress, model, run or tensors. The layouts and
versions that saved the checkpoints do not matter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megalite.frontends.tool_parser import ToolParser, local_path
from megalite.report import checkpoint_difference
from megalite.report.checkpoint_inspection import inspect, lines_of, open_view
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging


def main(arguments: Sequence[str]) -> None:
    """Print the report or the difference, and exit with status 1 if it is bad."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=local_path, metavar="FOLDER", help="checkpoint to inspect")
    add("--load-iteration", type=int, metavar="N", help="iteration in a run's folder; by default the latest")
    add("--verify", action="store_true", help="read every byte and compare it with SHA256SUMS")
    add("--norms", action="store_true", help="show norm, extremes, NaN and infinities of each tensor")
    add("--json", action="store_true", help="print one JSON object")
    add("--diff", type=local_path, metavar="OTHER", help="compare with the checkpoint in this folder")
    flags = parser.parse_args(arguments)
    configure_logging(rank=0, stream=sys.stderr)  # progress: standard output has the report alone
    sys.exit(0 if (_difference(flags) if flags.diff else _report(flags)) else 1)


def _report(flags: argparse.Namespace) -> bool:
    """Print one checkpoint; return whether it is undamaged."""
    report = inspect(open_view(flags.folder, flags.load_iteration), verify=flags.verify, norms=flags.norms)
    print(json.dumps(report.record()) if flags.json else "\n".join(lines_of(report)))
    return not report.damage


def _difference(flags: argparse.Namespace) -> bool:
    """Print the difference between two checkpoints; return whether they are equal."""
    if flags.verify or flags.norms:
        raise UserError("--verify and --norms are for one checkpoint: remove them, or --diff")
    views = [open_view(folder, flags.load_iteration) for folder in (flags.folder, flags.diff)]
    comparison = checkpoint_difference.compare(*views)
    lines = checkpoint_difference.lines_of(comparison)
    print(json.dumps(comparison.record()) if flags.json else "\n".join(lines))
    return comparison.is_equal
