#!/usr/bin/env python
"""Run `megalite merge-checkpoints` from a checkout: average the weights of checkpoints."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("merge-checkpoints")
