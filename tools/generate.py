#!/usr/bin/env python
"""Run `megalite generate` from a checkout: continue prompts with a trained model."""

import sys

from megalite.cli.generate import main
from megalite.config.entry_point import run_rank

if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
