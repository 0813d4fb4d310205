r"""Run the planner's best layouts for some iterations on this machine, and report which is the fastest.

megalite autotune --gpu h100 --world-size 8 --preset gpt-1.3b --global-batch-size 256 --mock-data
megalite autotune --calibrate --world-size 2 --preset gpt-tiny --vocab-size 256 \
    --global-batch-size 8 --mock-data

It takes all flags of megalite train, and the flags of megalite plan that describe the cluster. Layout options
that you pass stay fixed. The others are searched: tp and pp size, schedule, micro-batch size, recomputation,
ZeRO stage, sequence parallelism. No checkpoint is read or written.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from megalite.plan.autotune.autotune import autotune


def main(arguments: Sequence[str]) -> None:
    """Print each line as soon as it is known."""
    assert __doc__
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # raise an exception, as Ctrl-C does, so that the ranks end with this process
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    for line in autotune(arguments, __doc__):
        print(line, flush=True)
