#!/usr/bin/env python
"""Run `megalite verify` from a checkout: verify that a config trains the same run in any layout."""

import sys

from megalite.cli.verify import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
