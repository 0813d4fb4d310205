#!/usr/bin/env python
"""Run `megalite merge-checkpoints` from a checkout: average the weights of checkpoints."""

import sys

from megalite.cli.merge_checkpoints import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
