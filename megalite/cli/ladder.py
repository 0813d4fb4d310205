"""Train one family of models at several sizes, and fit the law that the losses follow.

megalite ladder write --depths 2,3,4,6 --tokens-per-parameter 20 --output runs/ladder --config reference.yaml
megalite train --config runs/ladder/depth-2/config.yaml
megalite ladder fit runs/ladder --predict runs/ladder/depth-12/config.yaml

`write` writes one config for each size. `fit` reads the finished runs, prints the law and its uncertainty,
and writes a plot. Each has its own --help. `fit` needs scipy and plotly: pip install 'megalite[ladder]'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.config.validate import problems_of
from megalite.frontends.command_line import parse_run
from megalite.frontends.tool_parser import ToolParser, local_path, positive_number
from megalite.plan.ladder.finished_runs import TooFewRuns, read_planned_run, read_runs
from megalite.plan.ladder.fit_report import fit_ladder, fit_lines, fit_page, fit_record
from megalite.plan.ladder.sizes import (
    BATCH_EXPONENT,
    ScalingRules,
    default_lr_exponent,
    ladder_lines,
    ladder_runs,
    write_configs,
)
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.files import write_output

WRITE = """Write one training config for each size of a ladder.

megalite ladder write --depths 2,3,4,6 --output runs/ladder --preset gpt-tiny --vocab-size 2048 --mock-data
megalite ladder write --widths 256,384,512 --tokens-per-parameter 10,20,40 --output runs/wide --config a.yaml

Accepts all flags of training (megalite train --help lists them). They describe the reference, a run whose
learning rate and batch size suit its size; the ladder scales it. And these:"""
FIT = """Fit loss against compute over the finished runs of a ladder, and write a plot and a JSON file.

megalite ladder fit runs/ladder
megalite ladder fit runs/ladder --predict runs/ladder/depth-12/config.yaml

Each FOLDER is a ladder's, or a run's with its metrics.jsonl and checkpoints."""


def main(arguments: Sequence[str]) -> None:
    """Run `write` or `fit`, or print the help of both."""
    parser = ToolParser(description=__doc__, usage="%(prog)s {write,fit} [flags]")
    parser.add_argument("step", choices=tuple(_STEPS), help="write the configs, or fit the finished runs")
    own = parser.parse_args(arguments[:1])
    _STEPS[own.step](arguments[1:], f"{parser.prog} {own.step}")


def _write(arguments: Sequence[str], prog: str) -> None:
    """Write the configs, and print the runs and how to start one."""
    parser = ToolParser(description=WRITE, prog=prog)
    add = parser.add_argument
    add("--depths", type=_whole_numbers, metavar="N,...", help="numbers of layers; the width grows with them")
    add("--widths", type=_whole_numbers, metavar="N,...", help="hidden sizes; the number of layers stays")
    add(
        "--tokens-per-parameter",
        type=_positive_numbers,
        default=(20.0,),
        metavar="X,...",
        help="tokens to train on, per parameter of layers and output layer (default 20); several for L(N, D)",
    )
    add("--output", type=local_path, required=True, metavar="FOLDER", help="folder of the ladder")
    add(
        "--batch-exponent",
        type=_number,
        default=BATCH_EXPONENT,
        metavar="X",
        help="the global batch size grows as parameters^X (default 2/3; 0: all have the same)",
    )
    add(
        "--lr-exponent",
        type=_number,
        metavar="X",
        help="the learning rate grows as parameters^X (default -1/3, or 0 with --mup-base-width)",
    )
    own, rest = parser.parse_known_args(arguments)
    if (own.depths is None) == (own.widths is None):
        raise UserError("pass the sizes with one of --depths and --widths, such as --depths 2,3,4,6")
    config, notices, set_fields = parse_run(rest, ("train_iters",), "gpt")
    lr_exponent = default_lr_exponent(config.model) if own.lr_exponent is None else own.lr_exponent
    rules = ScalingRules("width" if own.depths is None else "depth", own.batch_exponent, lr_exponent)
    runs = ladder_runs(config, rules, own.depths or own.widths, own.tokens_per_parameter)
    problems = [f"{run.name}: {line}" for run in runs for line in problems_of(run.config, None)]
    if problems:
        raise ConfigError(problems)
    files = list(write_configs(runs, own.output, set_fields))
    print("\n".join([*(f"note: {notice}" for notice in notices), *ladder_lines(runs), ""]))
    print("\n".join(map(str, files)))


def _fit(arguments: Sequence[str], prog: str) -> None:
    """Print the fit, and write the page and the JSON file."""
    parser = ToolParser(description=FIT, prog=prog)
    add = parser.add_argument
    add("folders", type=local_path, nargs="+", metavar="FOLDER", help="runs to fit")
    add("--predict", type=local_path, nargs="+", default=[], metavar="CONFIG", help="runs to predict")
    add("--dataset", metavar="NAME", help="validation set, for runs with several")
    add(
        "--output",
        "-o",
        type=local_path,
        metavar="FILE.html",
        help="the page; by default ladder.html in the first FOLDER. A .json of the same name is beside it",
    )
    own = parser.parse_args(arguments)
    page: Path = own.output or own.folders[0] / "ladder.html"
    record = page.with_suffix(".json")
    if page == record:
        raise UserError(f"--output {page} is the name of the JSON file beside the page: pass a .html")
    try:
        runs, notes = read_runs(own.folders, own.dataset)
    except TooFewRuns as error:
        _print_notes(error.notes)
        raise
    ladder = fit_ladder(runs, [read_planned_run(file) for file in own.predict])
    text = fit_page(ladder, own.folders[0].resolve().name)
    write_output(page, text, "--output")
    write_output(record, json.dumps({**fit_record(ladder), "notes": notes}, indent=2) + "\n", "--output")
    _print_notes(notes)
    print("\n".join([*fit_lines(ladder), "", str(page), str(record)]))


def _print_notes(notes: Sequence[str]) -> None:
    sys.stderr.writelines(f"note: {note}\n" for note in notes)


_STEPS = {"write": _write, "fit": _fit}


def _whole_numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and 0 < int(part) < 2**31 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0, such as 2,3,4")
    return [int(part) for part in text.split(",")]


def _positive_numbers(text: str) -> tuple[float, ...]:
    return tuple(map(positive_number, text.split(",")))


def _number(text: str) -> float:
    """Parse a number from -2 to 2; an argparse `type`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -2 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from -2 to 2")
    return value
