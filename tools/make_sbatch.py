#!/usr/bin/env python
"""Writes a batch script for Slurm that trains in a planned layout and goes on until the run is done.

python tools/make_sbatch.py --nodes 16 --gpu a100-80 --time 20:00:00 --preset gpt3-175b --tp 8 --pp 16 ...
python tools/make_sbatch.py --nodes 4 --gpu h100 --time 1-00:00:00 --config run.yaml --search

Takes the flags of the run, all that pretrain_gpt.py knows, and those of tools/plan.py that tell of the
cluster (--gpu-set, --node-gbps, --network-gbps, --train-tokens, --price-per-gpu-hour, --padded-vocab-size,
--search). Says what the plan says, refuses what does not fit in memory, warns of what will not go well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.launching.request import write_job


def main(arguments: Sequence[str]) -> None:
    """Writes the script and prints the plan."""
    assert __doc__
    print("\n".join(write_job(arguments, __doc__)))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
