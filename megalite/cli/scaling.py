r"""Run a layout on several numbers of nodes for some iterations, and compare its scaling with the plan.

megalite scaling --scaling 1,2,4 --calibrate --gpus-per-node 1 --preset gpt-tiny --vocab-size 256 \
    --global-batch-size 16 --mock-data
megalite scaling --scaling 1,2,4,8 --time 00:30:00 --gpu a100-80 --preset llama2-7b --tp 2 \
    --zero-stage 1 --global-batch-size 256 --bf16 --vocab-size 32000 --mock-data

The first runs here. With --time, the command writes a Slurm script for each run; once the jobs are done, the
same command prints the table. With weak scaling, each node has the same share of --global-batch-size. With
strong scaling, the batch is the same on any number of nodes. The command takes all flags of megalite train,
and the flags of megalite plan for --scaling.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from megalite.plan.measure_scaling import measure_scaling


def main(arguments: Sequence[str]) -> None:
    """Print each line as soon as it is known."""
    assert __doc__
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # raise an exception, so that the ranks end with this process
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    for line in measure_scaling(arguments, __doc__):
        print(line, flush=True)
