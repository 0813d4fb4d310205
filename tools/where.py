#!/usr/bin/env python
"""Run `megalite where` from a checkout: show the documents of the samples of an iteration."""

import sys

from megalite.cli.where import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
