#!/usr/bin/env python
"""Run `megalite upcycle` from a checkout: make a model with experts from a dense checkpoint."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("upcycle")
