#!/usr/bin/env python
"""Run `megalite ladder` from a checkout: train a family of models at several sizes, and fit its losses."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("ladder")
