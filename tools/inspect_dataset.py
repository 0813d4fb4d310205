#!/usr/bin/env python
"""Run `megalite inspect-dataset` from a checkout: show, check or compare datasets."""

import sys

from megalite.cli.inspect_dataset import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
