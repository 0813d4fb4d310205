#!/usr/bin/env python
"""Run `megalite show-schedule` from a checkout: draw a pipeline schedule."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("show-schedule")
