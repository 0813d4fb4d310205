"""Train a BERT model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 -m megalite train-bert --preset bert-base --tp 2 --pp 2 --data-path PREFIX …
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.pretraining import pretrain
from megalite.train.loop import Callback


def main(arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> None:
    """Run one rank from its command line to the end of training.

    Args:
        callbacks: your own, called before the run's.
    """
    pretrain("bert", arguments, callbacks)
