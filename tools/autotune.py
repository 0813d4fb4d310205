#!/usr/bin/env python
r"""Runs the planner's best layouts for some iterations on this machine, and says which is the fastest.

python tools/autotune.py --gpu h100 --world-size 8 --preset gpt-1.3b --global-batch-size 256 --mock-data
python tools/autotune.py --calibrate --world-size 2 --preset gpt-tiny --vocab-size 256 \
    --global-batch-size 8 --mock-data

Takes the flags of the run, all that pretrain_gpt.py knows, and those of tools/plan.py that tell of the
cluster. What of the layout is given stays, the rest is tried: sizes of tp and pp, schedule, micro-batch,
recomputation, ZeRO stage, sequence parallelism. No checkpoint is read or written.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.tuning.autotune import autotune


def main(arguments: Sequence[str]) -> None:
    """Prints each line as soon as it is there."""
    assert __doc__
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception, as Ctrl-C is: the ranks end with this
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    for line in autotune(arguments, __doc__):
        print(line, flush=True)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
