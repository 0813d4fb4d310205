#!/usr/bin/env python
"""Run `megalite report` from a checkout: write an HTML page about runs."""

import sys

from megalite.cli.report import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
