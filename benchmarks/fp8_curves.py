#!/usr/bin/env python
"""Train the quickstart's model with GEMMs in 8 and 4 bits, emulated, and compare its losses with fp32.

python benchmarks/fp8_curves.py runs/quickstart/corpus_text_document [--svg benchmarks/fp8_curves.svg]

Each recipe trains the same 500 iterations. All but the operands of GEMMs is in fp32, so that a difference is
one of the recipe. The picture has the difference of each loss, a mean over 20 iterations, from that in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from megalite.pipeline.draw_schedule import Colour, Drawing

ROOT = Path(__file__).parents[1]
RECIPES: dict[str, str] = {
    "fp32": "",
    "tensorwise": "--fp8 --emulate",
    "blockwise": "--fp8 --fp8-recipe blockwise --emulate",
    "mxfp8": "--fp8 --fp8-recipe mxfp8 --emulate",
    "mxfp8, e4m3": "--fp8-format e4m3 --fp8-recipe mxfp8 --emulate",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4 --emulate",
}
ITERATIONS, INTERVAL = 500, 20
COLOURS: list[Colour] = [(66, 119, 214), (46, 158, 107), (232, 156, 48), (140, 108, 200), (200, 70, 70)]
LARGEST = 0.02  # of the relative differences in the picture


def losses(corpus: str, flags: str, num_iterations: int) -> tuple[list[float], float]:
    """Return the mean losses of each 20 iterations, and the validation loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = (
            f"pretrain_gpt.py --config scripts/examples/quickstart.yaml --data-path {corpus} {flags} "
            f"--params-dtype fp32 --micro-batch-size 16 --train-iters {num_iterations} "
            f"--eval-interval {num_iterations} --eval-iters 16 --log-interval {INTERVAL} "
            f"--metrics-file {metrics}"
        )
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    means = [line["lm_loss"] for line in lines if "lm_loss" in line]
    validations = {line["validation"]["split"]: line["validation"] for line in lines if "validation" in line}
    return means, validations["valid"]["lm_loss"]


def draw(differences: dict[str, list[float]]) -> str:
    """Return a picture of relative differences over iterations, as SVG."""
    left, top, width, height = 70, 40, 560, 240
    drawing = Drawing(left + width + 130, top + height + 50)
    drawing.text(left, 22, "Loss with 8-bit and 4-bit GEMMs, relative to fp32", 14)
    for percent in (-2.0, -1.0, 0.0, 1.0, 2.0):
        y = top + height / 2 * (1 - percent / 100 / LARGEST)
        drawing.line([(left, y), (left + width, y)], (210, 210, 210))
        drawing.text(left - 8, y + 4, f"{percent:+.1f}%" if percent else "0", anchor="end")
    for (name, values), colour in zip(differences.items(), COLOURS, strict=True):
        points = [
            (
                left + width * (number + 1) / len(values),
                top + height / 2 * (1 - max(-1.0, min(1.0, value / LARGEST))),
            )
            for number, value in enumerate(values)
        ]
        drawing.line(points, colour, 2)
        drawing.text(left + width + 8, top + 16 + 18 * list(differences).index(name), name, ink=colour)
    drawing.text(left + width / 2, top + height + 34, f"iteration 0 to {ITERATIONS}", anchor="middle")
    return drawing.content()


def main() -> None:
    """Train, print a table, and draw the picture."""
    parser = argparse.ArgumentParser(description="Compare losses with narrow GEMMs with those of fp32.")
    parser.add_argument("corpus", help="prefix of the quickstart's corpus")
    parser.add_argument("--svg", type=Path, help="draw the differences into this file")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    own = parser.parse_args()
    found = {name: losses(own.corpus, flags, own.iterations) for name, flags in RECIPES.items()}
    reference, wide = found.pop("fp32")
    print(f"{'recipe':<14}{'largest difference':>20}{'last':>10}{'validation loss':>18}{'difference':>12}")
    print(f"{'fp32':<14}{'':>20}{'':>10}{wide:>18.4f}")
    differences = {}
    for name, (means, validation) in found.items():
        own_differences = [one / other - 1.0 for one, other in zip(means, reference, strict=True)]
        differences[name] = own_differences
        largest = max(own_differences, key=abs)
        shown = f"{largest:>20.3%}{own_differences[-1]:>10.3%}{validation:>18.4f}"
        print(f"{name:<14}{shown}{validation / wide - 1:>12.3%}")
    if own.svg is not None:
        own.svg.write_text(draw(differences))


if __name__ == "__main__":
    main()
