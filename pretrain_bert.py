#!/usr/bin/env python
"""Trains a BERT model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 pretrain_bert.py --preset bert-base --tp 2 --pp 2 --data-path PREFIX …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.config.entry_point import run_rank
from megalite.pretraining import pretrain
from megalite.train.loop import Callback


def main(arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> None:
    """Run one rank from its command line to the end of training.

    Args:
        callbacks: your own, called before the run's.
    """
    pretrain("bert", arguments, callbacks)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
