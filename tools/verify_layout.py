#!/usr/bin/env python
"""Run `megalite verify` from a checkout: verify that a config trains the same run in any layout."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("verify")
