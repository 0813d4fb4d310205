#!/usr/bin/env python
"""Run `megalite scaling` from a checkout: measure how a run scales over nodes."""

import sys

from megalite.cli.scaling import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
