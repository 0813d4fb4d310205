#!/usr/bin/env python
"""Run `megalite ladder` from a checkout: train a family of models at several sizes, and fit its losses."""

import sys

from megalite.cli.ladder import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
