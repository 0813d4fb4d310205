#!/usr/bin/env python
"""Run `megalite merge-datasets` from a checkout: join datasets."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("merge-datasets")
