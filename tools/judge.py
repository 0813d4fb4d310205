#!/usr/bin/env python
"""Run `megalite judge` from a checkout: judge whether another program trains the same run in any layout."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("judge")
