#!/usr/bin/env python
"""Run `megalite plan` from a checkout: estimate memory, time and price of a run, and search its layout."""

import sys

from megalite.cli.plan import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
