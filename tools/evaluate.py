#!/usr/bin/env python
"""Run `megalite evaluate` from a checkout: compute loss and perplexity of text."""

import sys

from megalite.cli.evaluate import main
from megalite.config.entry_point import run_rank

if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
