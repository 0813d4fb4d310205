#!/usr/bin/env python
"""Run `megalite evaluate` from a checkout: compute loss and perplexity of text."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("evaluate")
