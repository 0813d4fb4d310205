#!/usr/bin/env python
"""Run `megalite merge-datasets` from a checkout: join datasets."""

import sys

from megalite.cli.merge_datasets import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
