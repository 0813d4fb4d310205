#!/usr/bin/env python
"""Run `megalite inspect` from a checkout: show, check or compare checkpoints."""

import sys

from megalite.cli.inspect import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
