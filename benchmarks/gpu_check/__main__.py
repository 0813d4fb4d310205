"""Check a machine with GPUs, in stages of at most 9 minutes: scripts/check_gpu.sh calls this program.

scripts/check_gpu.sh --out FOLDER
scripts/check_gpu.sh --stage 3
scripts/check_gpu.sh --links

Each stage writes stage_N.json and stage_N.log to the folder and goes on after a failure. A table of measured
and expected values ends the run. The exit status is 1 if a check failed; being slower than expected is no
failure. --links only reports which links NCCL uses, also over several nodes. docs/gpu_check.md describes the
checks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.links import check_links
from benchmarks.gpu_check.results import Result, has_failed, table
from benchmarks.gpu_check.runner import ROOT, run_stage
from benchmarks.gpu_check.stages import STAGES


def main(arguments: Sequence[str]) -> int:
    """Run the stages and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "check_gpu",
        help="default: runs/check_gpu of the repository",
    )
    parser.add_argument(
        "--stage",
        type=int,
        nargs="+",
        choices=[stage.number for stage in STAGES],
        help="default: all; 5 needs more than one GPU",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="try the checks themselves, on the CPU at tiny sizes"
    )
    parser.add_argument(
        "--links",
        nargs=argparse.REMAINDER,
        metavar="TORCHRUN-FLAG",
        help="report which links NCCL uses within and between nodes; what follows goes to torchrun",
    )
    args = parser.parse_args(arguments)
    if not args.rehearse and (problem := gpu_problem()):
        print(problem, file=sys.stderr)
        return 1
    if args.links is not None:
        return check_links(args.links, "cpu" if args.rehearse else "cuda")
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for stage in STAGES:
        if args.stage is None or stage.number in args.stage:
            device = "cpu" if args.rehearse else "cuda"
            results += run_stage(stage, args.out.resolve(), device, is_small=args.rehearse)
    print(table(results))
    print(f"logs and JSON: {args.out}")
    return 1 if has_failed(results) else 0


def gpu_problem() -> str:
    """Return why nothing can be checked on this machine, in a line; an empty string if it has a GPU."""
    try:
        import torch
    except ImportError as error:
        return f"error: {sys.executable} cannot import torch ({error}): run scripts/install.sh, or set PYTHON"
    if torch.cuda.is_available():
        return ""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"error: torch {torch.__version__} (built {built}) finds no GPU on this machine: nothing was checked"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
