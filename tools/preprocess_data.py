#!/usr/bin/env python
"""Run `megalite preprocess` from a checkout: tokenize text files to a dataset."""

import sys

from megalite.cli.preprocess import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
