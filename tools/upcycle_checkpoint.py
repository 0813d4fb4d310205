#!/usr/bin/env python
"""Run `megalite upcycle` from a checkout: make a model with experts from a dense checkpoint."""

import sys

from megalite.cli.upcycle import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
