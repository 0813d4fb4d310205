"""Check a machine with GPUs, in stages of at most 10 minutes: scripts/check_gpu.sh calls this program.

scripts/check_gpu.sh --minutes 45
scripts/check_gpu.sh --stage 3
scripts/check_gpu.sh --stage 3 --resume
scripts/check_gpu.sh --links

Stages run in the order 1, 3, 6, 2, 4, 5, 8, 10, 7, 9, 11. Each writes stage_N.json and stage_N.log to the
folder and goes on after a failure. A table of measured and expected values ends the run; summary.txt in the
folder has the tables of all stages. The exit status is 1 if a check failed; being slower than expected or out
of time is no failure. --links only reports which links NCCL uses, also over several nodes.
docs/gpu_check.md describes the checks.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.commands import first_line
from benchmarks.gpu_check.links import check_links
from benchmarks.gpu_check.results import Result, cut, has_failed, table
from benchmarks.gpu_check.runner import ROOT, Stage, StageRunner, is_complete, load_stage
from benchmarks.gpu_check.stages import STAGES, fitting

PACKAGES = ("numpy", "yaml", "safetensors", "pybind11", "setuptools")
TEST_PACKAGES = ("pytest", "hypothesis")
STAGES_OF_TESTS = (1, 6, 7, 9, 10, 11)
DETAIL = 120
"""Characters of a row's detail in the table; the JSON has all."""


def main(arguments: Sequence[str]) -> int:
    """Run the stages and return the exit status."""
    args = parse_arguments(arguments)
    device = "cpu" if args.rehearse else "cuda"
    problem = "" if args.rehearse else gpu_problem()
    if args.links is None:
        problem = problem or package_problem([stage.number for stage in args.stages])
    if problem:
        print(problem, file=sys.stderr)
        return 1
    if args.links is not None:
        return check_links(args.links, device)
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the check's programs too
    machine = machine_in_words(device)
    print(f"{machine}; results go to {args.out}", flush=True)
    results: list[Result] = []
    is_done = False
    try:
        run_stages(args, device, machine, results)
        is_done = True
    finally:
        text = summary(args.out, machine)
        print(table(results, DETAIL) if is_done else f"interrupted; finished are:\n{text}")
        (args.out / "summary.txt").write_text(text, encoding="utf-8")
        print(f"all stages so far, to paste: {args.out / 'summary.txt'}; logs and JSON beside it")
        print(next_command(args, machine), flush=True)
    return 1 if has_failed(results) else 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, and with them `stages`, the requested stages in their order."""
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
        choices=sorted(stage.number for stage in STAGES),
        help="default: all",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="time of the whole command: it leaves out stages that do not fit, and names them at the end",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the results in --out of checks that came to their end on this machine, and run the others",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="try the checks themselves, on the CPU at tiny sizes"
    )
    parser.add_argument(
        "--nccl",
        type=Path,
        metavar="FILE",
        help="a libnccl.so.2 of NCCL 2.30 or later, to preload in stages 5 and 11 if ranks share one GPU; "
        "default: torch's",
    )
    parser.add_argument(
        "--links",
        nargs=argparse.REMAINDER,
        metavar="TORCHRUN-FLAG",
        help="report which links NCCL uses within and between nodes; what follows goes to torchrun",
    )
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()
    args.stages = [stage for stage in STAGES if args.stage is None or stage.number in args.stage]
    if args.nccl is not None and args.rehearse:
        parser.error("--nccl has no effect with --rehearse, which runs on a CPU: remove it")
    if args.nccl is not None and not args.nccl.is_file():
        parser.error(f"--nccl {args.nccl}: there is no such file")
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: pass a number above 0")
    return args


def run_stages(args: argparse.Namespace, device: str, machine: str, results: list[Result]) -> None:
    """Run the requested stages as far as time goes, and append what they find to `results`."""
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    runner = StageRunner(
        args.out, device, machine, is_small=args.rehearse, end=end, resumes=args.resume, nccl=args.nccl
    )
    possible = []
    for stage in args.stages:
        if args.resume and is_complete(args.out, stage, machine):
            results += runner.run(stage)
        else:
            possible.append(stage)
    planned = possible if end is None else fitting(possible, runner.seconds_left)
    if left_out := [stage for stage in possible if stage not in planned]:
        print(
            f"{args.minutes:g} minutes suffice for {numbers(planned)}; "
            f"what runs only if time is left: {numbers(left_out)}",
            flush=True,
        )
    for stage in possible:
        if stage in planned or stage.seconds <= runner.seconds_left:
            results += runner.run(stage)
        else:
            reason = f"left out: takes up to {stage.seconds / 60:.0f} minutes"
            results.append(cut(f"stage {stage.number}: {stage.title}", reason))


def numbers(stages: Sequence[Stage]) -> str:
    """Return the numbers of stages with commas, after the word."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(str(stage.number) for stage in stages)}"


def machine_in_words(device: str) -> str:
    """Return GPU and torch, as the results are recorded with them."""
    import torch

    if device == "cpu":
        return "rehearsal on a CPU"
    name = first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}"


def summary(out: Path, machine: str) -> str:
    """Return the tables of all stages that have run on this machine."""
    commit = first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    parts = [f"{machine}; megalite {commit}; {time.strftime('%Y-%m-%d %H:%M')}"]
    for stage in STAGES:
        if checks := load_stage(out, stage, machine):
            minutes = sum(each.seconds for each in checks) / 60
            results = [result for each in checks for result in each.results]
            parts.append(
                f"stage {stage.number}: {stage.title} ({minutes:.1f} minutes)\n{table(results, DETAIL)}"
            )
    return "\n\n".join(parts) + "\n"


def next_command(args: argparse.Namespace, machine: str) -> str:
    """Return which command runs the next stage that is not complete."""
    remaining = [stage for stage in STAGES if not is_complete(args.out, stage, machine)]
    if not remaining:
        return "all stages are complete"
    nccl = f" --nccl {args.nccl}" if args.nccl else ""
    rehearse = " --rehearse" if args.rehearse else ""
    options = f"--out {args.out} --resume --stage {remaining[0].number}{nccl}{rehearse}"
    return f"not complete: {numbers(remaining)}; next: scripts/check_gpu.sh {options}"


def gpu_problem() -> str:
    """Return why nothing can be checked on this machine, in a line; an empty string if it has a GPU."""
    try:
        import torch
    except ImportError as error:
        return f"error: {sys.executable} cannot import torch ({error}): run scripts/install.sh, or set PYTHON"
    if torch.cuda.is_available():
        return ""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    hint = ""
    if not torch.version.cuda and shutil.which("nvidia-smi"):
        hint = (
            "; install a torch for CUDA there, or remove .venv and set PYTHON to an environment that has one"
        )
    return (
        f"error: torch {torch.__version__} of {sys.executable} (built {built}) finds no GPU on this machine: "
        f"nothing was checked{hint}"
    )


def package_problem(stages: Sequence[int]) -> str:
    """Return which packages these stages need and this Python lacks, in a line; else an empty string."""
    is_tested = set(stages) & set(STAGES_OF_TESTS)
    needed = PACKAGES + (TEST_PACKAGES if is_tested else ())
    missing = [name.replace("yaml", "pyyaml") for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    without = [stage.number for stage in STAGES if stage.number not in STAGES_OF_TESTS]
    hint = ""
    if set(missing) <= set(TEST_PACKAGES):
        hint = f", or run the stages without tests: --stage {' '.join(map(str, without))}"
    return f"error: {sys.executable} lacks {', '.join(missing)}: pip install {' '.join(missing)}{hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
