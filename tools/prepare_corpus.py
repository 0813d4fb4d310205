#!/usr/bin/env python
"""Run `megalite prepare` from a checkout: filter, deduplicate, shuffle and tokenize raw text."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("prepare")
