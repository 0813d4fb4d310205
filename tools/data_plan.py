#!/usr/bin/env python
"""Run `megalite data-plan` from a checkout: show the epochs of each source in a mixture that changes."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("data-plan")
