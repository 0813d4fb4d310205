#!/usr/bin/env python
"""Run `megalite inspect-dataset` from a checkout: show, check or compare datasets."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("inspect-dataset")
