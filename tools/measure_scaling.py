#!/usr/bin/env python
"""Run `megalite scaling` from a checkout: measure how a run scales over nodes."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("scaling")
