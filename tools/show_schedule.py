#!/usr/bin/env python
"""Run `megalite show-schedule` from a checkout: draw a pipeline schedule."""

import sys

from megalite.cli.show_schedule import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
