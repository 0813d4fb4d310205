#!/usr/bin/env python
"""Run `megalite train-tokenizer` from a checkout: train a BPE or SentencePiece tokenizer."""

import sys

from megalite.cli.train_tokenizer import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
