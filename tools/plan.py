#!/usr/bin/env python
"""Run `megalite plan` from a checkout: estimate memory, time and price of a run, and search its layout."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("plan")
