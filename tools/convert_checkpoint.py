#!/usr/bin/env python
"""Run `megalite convert` from a checkout: convert a checkpoint of Hugging Face or Megatron-LM."""

import sys

from megalite.cli.convert import main
from megalite.config.entry_point import run_main

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
