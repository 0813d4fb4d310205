#!/usr/bin/env python
"""Run `megalite launch` from a checkout: write a Slurm script or a Kubernetes job."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("launch")
