#!/usr/bin/env python
"""Run `megalite autotune` from a checkout: measure the planner's best layouts on this machine."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("autotune")
