r"""Add work of your own to a run: write the loss to a CSV file, and stop once it no longer improves.

torchrun --nproc-per-node 4 examples/own_callback.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --train-iters 20 --lr 1e-3 --global-batch-size 8 --micro-batch-size 2 --eval-interval 5 \
    --eval-iters 1 --save checkpoints --load checkpoints
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import megalite


class LossFile(megalite.Callback):
    """Append each iteration's loss to a file, on rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def needs_boundary(self, loop: megalite.TrainingLoop, iteration: int) -> bool:
        """Let a GPU begin the next iteration before `after_iteration` runs, which only uses the result."""
        return False

    def after_iteration(self, loop: megalite.TrainingLoop, result: megalite.StepResult) -> None:
        """Write one line."""
        if loop.trainer.topology.rank == 0:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow([loop.iteration, result.loss, result.grad_norm])


class EarlyStopping(megalite.Callback):
    """Stop the run after some evaluations without a lower loss, with a checkpoint if there is --save."""

    def __init__(self, patience: int) -> None:
        self.patience, self.lowest, self.num_worse = patience, math.inf, 0

    def on_evaluation(self, loop: megalite.TrainingLoop, metrics: Any) -> None:
        """Request the stop on every rank: each has the same metrics."""
        if metrics.is_of_average:  # with --ema-decay
            return
        self.num_worse = 0 if metrics.lm_loss < self.lowest else self.num_worse + 1
        self.lowest = min(self.lowest, metrics.lm_loss)
        if self.num_worse >= self.patience:
            loop.request_stop(megalite.Stop(f"{self.num_worse} evaluations without a lower loss"))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"lowest": self.lowest, "num_worse": self.num_worse}

    def load_state(self, state: Any) -> None:
        """Continue in a resumed run."""
        self.lowest, self.num_worse = state["lowest"], state["num_worse"]


if __name__ == "__main__":
    megalite.pretrain(callbacks=[LossFile(Path("loss.csv")), EarlyStopping(patience=3)])
