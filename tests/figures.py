"""Count what a change of the package costs: its size, and the files that an option or a step touches.

`tests/figures.json` has the most that each figure may be: "limits", which only fall, and "prices", what each
feature has added since. After a change that lowers figures, lower the limits too. A feature that users have
asked for states its price, which then stands in its commit:

python -m tests.figures                       run from the repository root
python -m tests.figures --price "data phases"
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megalite"
LIMITS = Path(__file__).with_name("figures.json")
SHORT = 50
"""Lines below which a file is short."""
OPTIONS = {
    "attention sinks": "sink",
    "shared keys": "kv_shared|shared_keys|key_source|gives_keys",
    "Muon": "muon",
    "context parallelism": r"\bcp\b|(?<!d)cp_|context_parallel",  # not dcp_
}
"""What a file names if it is about an option, as a regular expression, by option."""
TRACED = """
import inspect
import sys
import torch
from megalite.cli.train import main
from megalite.train.trainer import Trainer

files, of_steps, is_in_step = set(), [], False
step = Trainer.step.__code__

def note(frame, event, argument):
    global is_in_step
    if event not in ("call", "return"):  # most events are of C functions
        return
    code = frame.f_code
    if code is step:
        is_in_step = event == "call"
        if is_in_step:
            of_steps.append(set())
        elif event == "return" and len(of_steps) == 2:
            print("FILES", len(files), len(of_steps[1]), flush=True)
            sys.setprofile(None)
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
    if event == "call" and is_function and "/megalite/" in code.co_filename:
        files.add(code.co_filename)
        if is_in_step:
            of_steps[-1].add(code.co_filename)

sys.setprofile(note)
main(sys.argv[1:])
"""


def count_in_sources() -> dict[str, int]:
    """Return the figures that the sources show, by name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    lines = [text.count("\n") for text in texts.values()]
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    return {
        "lines": sum(lines),
        "files": len(lines),
        f"files under {SHORT} lines": sum(count < SHORT for count in lines),
        "functions": sum(isinstance(node, ast.FunctionDef) for node in nodes),
        "entries of megalite/": len({path.relative_to(PACKAGE).parts[0] for path in texts}),
        "errors of a config (Problem)": sum(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem"
            for node in nodes
        ),
        **{
            f"files that name {option}": sum(bool(re.search(words, text, re.I)) for text in texts.values())
            for option, words in OPTIONS.items()
        },
    }


def count_in_run() -> dict[str, int]:
    """Return the number of files whose functions run, in the main thread, in two iterations of gpt-tiny."""
    flags = "--preset gpt-tiny --mock-data --vocab-size 100 --train-iters 2 --eval-iters 0 --layout manual"
    with TemporaryDirectory() as cache:  # records of earlier plans would leave out the files that make them
        done = subprocess.run(
            [sys.executable, "-c", TRACED, *flags.split()],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": cache},
            capture_output=True,
            text=True,
            check=True,
        )
    (found,) = re.findall(r"^FILES (\d+) (\d+)$", done.stdout, re.M)
    return {
        "files that run from main() to the second update": int(found[0]),
        "files that run in a step": int(found[1]),
    }


def above_limits(figures: Mapping[str, int]) -> list[str]:
    """Return a line for each figure that is above its limit and the prices of features."""
    allowed = _allowed(json.loads(LIMITS.read_text(encoding="utf-8")))
    return [
        f"{name}: {figure}, at most {allowed[name]}"
        for name, figure in figures.items()
        if figure > allowed[name]
    ]


def lower(record: dict[str, Any], figures: Mapping[str, int], feature: str | None = None) -> dict[str, Any]:
    """Return limits and prices: lower limits where figures fell, or what a feature has added as its price."""
    excess = {
        name: figure - allowed for name, allowed in _allowed(record).items() if (figure := figures[name])
    }
    fallen = {name: min(difference, 0) for name, difference in excess.items()}
    prices = dict(record["prices"])
    if feature is not None:
        added = {name: difference for name, difference in excess.items() if difference > 0}
        old = prices.get(feature, {})
        prices[feature] = old | {name: old.get(name, 0) + difference for name, difference in added.items()}
    limits = {name: limit + fallen[name] for name, limit in record["limits"].items()}
    return {"limits": limits, "prices": prices}


def _allowed(record: dict[str, Any]) -> dict[str, int]:
    prices = record["prices"].values()
    return {
        name: limit + sum(price.get(name, 0) for price in prices) for name, limit in record["limits"].items()
    }


def main() -> None:
    """Write the figures of this checkout as the new limits, unless they are higher."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--price", metavar="FEATURE", help="what is above the limits is the price of this feature"
    )
    feature = parser.parse_args().price
    record, figures = json.loads(LIMITS.read_text(encoding="utf-8")), count_in_sources() | count_in_run()
    LIMITS.write_text(json.dumps(lower(record, figures, feature), indent=1) + "\n", encoding="utf-8")
    for name, before in _allowed(record).items():
        print(f"{name:<50}{before:8}{figures[name]:8}")


if __name__ == "__main__":
    main()
