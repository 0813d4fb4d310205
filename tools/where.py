#!/usr/bin/env python
"""Run `megalite where` from a checkout: show the documents of the samples of an iteration."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("where")
