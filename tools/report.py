#!/usr/bin/env python
"""Run `megalite report` from a checkout: write an HTML page about runs."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("report")
