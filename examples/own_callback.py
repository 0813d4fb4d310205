"""Add work of your own to a run: write the loss to a CSV file, and stop once it is low enough.

torchrun --nproc-per-node 4 examples/own_callback.py --tp 2 --pp 2 --preset gpt-tiny --mock-data
    --vocab-size 512 --train-iters 20 --lr 1e-3 --global-batch-size 8 --micro-batch-size 2
"""

from __future__ import annotations

import csv
from pathlib import Path

import megalite


class LossFile(megalite.Callback):
    """Append each iteration's loss to a file, on rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_iteration(self, loop: megalite.TrainingLoop, result: megalite.StepResult) -> None:
        """Write one line."""
        if loop.trainer.topology.rank == 0:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow([loop.iteration, result.loss, result.grad_norm])


class StopAtLoss(megalite.Callback):
    """Stop the run, with a checkpoint if there is a --save folder."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def after_step(self, loop: megalite.TrainingLoop, result: megalite.StepResult) -> None:
        """Request the stop on every rank: each has the same result."""
        if result.loss < self.loss:
            loop.request_stop(megalite.Stop(f"the loss is below {self.loss}"))


if __name__ == "__main__":
    megalite.pretrain(callbacks=[LossFile(Path("loss.csv")), StopAtLoss(6.0)])
