"""Plan runs before they start: estimate them, write their jobs, measure layouts, draw schedules."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.pipeline.schedules import SCHEDULES, ScheduleName
from megalite.plan.plan_report import answer
from megalite.plan.write_job import write_job
from megalite.utils.errors import UserError
from megalite.utils.log import ProgressLine


def plan(arguments: Sequence[str]) -> None:
    """Plan a run without a cluster: memory per rank, time per iteration, and the best layout."""
    if arguments[:1] == ["--for"]:
        _plan_other_program(arguments[1:])
        return
    with ProgressLine() as show:
        lines = answer(arguments, show)
    print("\n".join(lines))


def _plan_other_program(arguments: Sequence[str]) -> None:
    """Plan another program's command line, by the models of other programs in the repository.

    Raises:
        UserError: megalite runs without its repository.
    """
    repository = Path(__file__).parents[2]
    if not (repository / "benchmarks" / "plan_for.py").exists():
        raise UserError(
            "--for is in megalite's repository and not in its package: clone it, and run PYTHONPATH=. python "
            f"benchmarks/plan_for.py {' '.join(arguments[:1])} … in it"
        )
    sys.path.insert(0, str(repository))
    importlib.import_module("benchmarks.plan_for").main(arguments)


def launch(arguments: Sequence[str]) -> None:
    """Write a job for Slurm or Kubernetes that trains in a planned layout and restarts until the run is done.

    megalite launch --nodes 16 --gpu a100-80 --time 20:00:00 --preset gpt3-175b --tp 8 --pp 16 ...
    megalite launch --nodes 4 --gpu h100 --time 1-00:00:00 --config run.yaml --search
    megalite launch --nodes 4 --gpu h100 --kubernetes REGISTRY/megalite --volume runs:/runs --save /runs/a ...

    It takes all flags of megalite train, and the flags of megalite plan that describe the cluster (--gpu-set,
    --node-gbps, --network-gbps, --train-tokens, --price-per-gpu-hour, --padded-vocab-size, --search). It
    prints the plan, refuses a layout that does not fit in memory, and warns about likely problems.
    """
    print("\n".join(write_job(arguments, launch.__doc__ or "")))


def autotune(arguments: Sequence[str]) -> None:
    r"""Run the planner's best layouts for some iterations on this machine, and report which is the fastest.

    megalite autotune --gpu h100 --world-size 8 --preset gpt-1.3b --global-batch-size 256 --mock-data
    megalite autotune --calibrate --world-size 2 --preset gpt-tiny --vocab-size 256 \
        --global-batch-size 8 --mock-data

    It takes all flags of megalite train, and the flags of megalite plan that describe the cluster. Layout
    options that you pass stay fixed. The others are searched: tp and pp size, schedule, micro-batch size,
    recomputation, ZeRO stage, sequence parallelism. No checkpoint is read or written.
    """
    from megalite.plan.measure import autotune as autotuned

    _print_lines(autotuned, arguments, autotune.__doc__)


def scaling(arguments: Sequence[str]) -> None:
    r"""Run a layout on several numbers of nodes for some iterations, and compare its scaling with the plan.

    megalite scaling --scaling 1,2,4 --calibrate --gpus-per-node 1 --preset gpt-tiny --vocab-size 256 \
        --global-batch-size 16 --mock-data
    megalite scaling --scaling 1,2,4,8 --time 00:30:00 --gpu a100-80 --preset llama2-7b --tp 2 \
        --zero-stage 1 --global-batch-size 256 --bf16 --vocab-size 32000 --mock-data

    The first runs here. With --time, the command writes a Slurm script for each run; once the jobs are done,
    the same command prints the table. With weak scaling, each node has the same share of --global-batch-size.
    With strong scaling, the batch is the same on any number of nodes. The command takes all flags of megalite
    train, and the flags of megalite plan for --scaling.
    """
    from megalite.plan.measure import measure_scaling

    _print_lines(measure_scaling, arguments, scaling.__doc__)


def _print_lines(
    program: Callable[[Sequence[str], str], Iterable[str]], arguments: Sequence[str], description: str | None
) -> None:
    # Raise an exception, as Ctrl-C does, so that the ranks end with this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    for line in program(arguments, description or ""):
        print(line, flush=True)


def show_schedule(arguments: Sequence[str]) -> None:
    """Draw a pipeline schedule in the terminal, with its bubble and its peak of microbatches in flight."""
    from megalite.pipeline.draw_schedule import draw, save_picture, save_svg

    parser = ToolParser(
        description="Draw a schedule: F is forward, B backward (only input gradients if there is a W), "
        "W weight gradients, dots are idle time; a letter after a number is the chunk."
    )
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--stages", type=positive_int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="microbatches per iteration")
    parser.add_argument(
        "--chunks", type=positive_int, help="chunks per rank of the interleaved schedule (default 2)"
    )
    parser.add_argument("--png", type=local_path, help="also draw a picture to this PNG file")
    parser.add_argument("--svg", type=local_path, help="also draw an SVG file, which needs no package")
    flags = parser.parse_args(arguments)
    sizes = flags.schedule, flags.stages, flags.microbatches, _num_chunks(flags.schedule, flags.chunks)
    print(draw(*sizes))
    if flags.png:
        save_picture(flags.png, *sizes)
    if flags.svg:
        save_svg(flags.svg, *sizes)


def _num_chunks(schedule: ScheduleName, requested: int | None) -> int | None:
    fixed = SCHEDULES[schedule].num_chunks
    if requested is None or requested == fixed or (fixed is None and requested > 1):
        return requested
    allowed = "two chunks or more" if fixed is None else f"{fixed} on each rank: remove --chunks"
    raise UserError(f"--chunks {requested} with --schedule {schedule}, which has {allowed}")
