#!/usr/bin/env python
"""Run `megalite train-bert` from a checkout: train a BERT model; under torchrun, on many ranks."""

import sys

from megalite.cli.train_bert import main
from megalite.config.entry_point import run_rank

if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
