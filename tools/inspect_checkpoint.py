#!/usr/bin/env python
"""Run `megalite inspect` from a checkout: show, check or compare checkpoints."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("inspect")
