#!/usr/bin/env python
"""Run `megalite autotune` from a checkout: measure the planner's best layouts on this machine."""

import sys

from megalite.cli.autotune import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
