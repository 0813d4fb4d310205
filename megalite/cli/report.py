"""Write one HTML page of tables about one or several runs. It opens without a network.

megalite report runs/quickstart
megalite report runs/a runs/b -o compare.html
megalite report runs/a --against-plan plan.json

RUN is a run's folder or its metrics file (--metrics-file). Besides the metrics, the page shows the
checkpoints, config, pipeline trace and logs in that folder. Without a metrics file, TensorBoard's files are
read. TensorBoard and Weights & Biases draw the curves: --tensorboard-dir, --wandb-project.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalite.frontends.tool_parser import ToolParser, local_path
from megalite.observe.report.page import page
from megalite.observe.report.run_folder import open_run
from megalite.observe.report.time_report import time_comparison
from megalite.utils.errors import UserError
from megalite.utils.files import write_output


def main(arguments: Sequence[str]) -> None:
    """Write the page and print its path."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("runs", type=local_path, nargs="+", metavar="RUN", help="folder or metrics file")
    add(
        "--output",
        "-o",
        type=local_path,
        metavar="FILE",
        help="the page; by default report.html in the run's folder, or in the current one for several runs",
    )
    add("--log", type=local_path, nargs="+", default=[], metavar="FILE", help="further logs of the first run")
    add(
        "--against-plan",
        type=local_path,
        metavar="FILE",
        help="compare the time of an iteration with the output of megalite plan --json, and print why it is "
        "longer; the run needs --log-time-breakdown",
    )
    flags = parser.parse_args(arguments)
    first = open_run(flags.runs[0], logs=tuple(flags.log))
    runs = [first, *map(open_run, flags.runs[1:])]
    output = flags.output or _output(flags.runs)
    if output.exists() and any(output.samefile(run.source) for run in runs):
        raise UserError(f"--output {output} is the metrics file of a run: pass another file")
    if flags.against_plan and len(runs) > 1:
        raise UserError(f"--against-plan {flags.against_plan} is the plan of one run: pass one RUN")
    comparisons = [time_comparison(run, flags.against_plan) for run in runs]
    text = page(runs, comparisons)
    write_output(output, text, "--output")
    for comparison in comparisons if flags.against_plan else ():
        print("\n".join(comparison.lines() if comparison else ()))
    print(output)


def _output(runs: Sequence[Path]) -> Path:
    folder = Path() if len(runs) > 1 else runs[0] if runs[0].is_dir() else runs[0].parent
    return folder / "report.html"
