r"""Train on a dataset of your own: sums of two numbers, whose result alone has a loss.

torchrun --nproc-per-node 4 examples/own_dataset.py --tp 2 --pp 2 --preset gpt-tiny --seq-length 32 \
    --vocab-size 256 --train-iters 20 --lr 1e-3 --global-batch-size 16 --micro-batch-size 4 --eval-interval 10
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import megalite

FIELDS = ("tokens", "labels", "loss_mask")


class Sums:
    """Return ``12+34=46`` in bytes; a sample depends on its number alone, on every rank."""

    def __init__(self, first: int, last: int, seq_length: int) -> None:
        self.first, self.last, self.seq_length = first, last, seq_length

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.generic]]:
        a, b = divmod(self.first + index, 100)
        question, answer = f"{a}+{b}=".encode(), f"{a + b}\n".encode()
        text = np.zeros(self.seq_length + 1, np.int64)
        text[: len(question + answer)] = list(question + answer)
        has_loss = np.zeros(self.seq_length, bool)
        has_loss[len(question) - 1 :][: len(answer)] = True
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": has_loss}


def datasets(run: megalite.RunContext) -> megalite.DatasetSplits:
    """Train on the sums of numbers below 90, in a new order each epoch; evaluate on the others."""
    config, dp = run.config, run.topology.dp.size
    s, seed = config.model.seq_length, config.training.seed
    num_train, num_valid, _ = megalite.num_samples_of(config, dp)
    train = megalite.Epochs(Sums(0, 9000, s), num_train, seed)
    valid = megalite.Epochs(Sums(9000, 10000, s), num_valid, seed)
    return megalite.DatasetSplits(train, valid, test=None)


if __name__ == "__main__":
    megalite.pretrain(dataset_provider=datasets, samples=megalite.FieldSamples(FIELDS))
