#!/usr/bin/env python
"""Run `megalite launch` from a checkout: write a Slurm script or a Kubernetes job."""

import sys

from megalite.cli.launch import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
