#!/usr/bin/env python
"""Run `megalite preprocess` from a checkout: tokenize text files to a dataset."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("preprocess")
