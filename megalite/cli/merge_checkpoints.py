"""Average the weights of checkpoints of one model.

megalite merge-checkpoints --load CHECKPOINTS --last 5 --save AVERAGE
megalite merge-checkpoints --load CHECKPOINTS --last 5 --ema-decay 0.8 --save AVERAGE
megalite merge-checkpoints --load RUN_A RUN_B/iter_0001000 --weights 0.7 0.3 --save AVERAGE

--load names folders of runs, of which the latest checkpoint is read, or of single checkpoints, saved in any
layout. The new checkpoint holds only weights. Evaluate it, convert it, or train from it with --finetune.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megalite.checkpoint.convert.average import average, last_checkpoints, moving_average
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging


def main(arguments: Sequence[str]) -> None:
    """Average checkpoints."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("--load", type=local_path, nargs="+", required=True, metavar="FOLDER", help="checkpoints to average")
    add("--last", type=positive_int, metavar="N", help="average the last N checkpoints of the run in --load")
    add("--weights", type=float, nargs="+", metavar="W", help="one per checkpoint; by default all are equal")
    add(
        "--ema-decay",
        type=float,
        metavar="D",
        help="exponential moving average: each checkpoint, oldest first, replaces a share of 1 - D",
    )
    add("--save", type=local_path, required=True, metavar="FOLDER", help="new folder to write")
    add("--params-dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="by default the last checkpoint's")
    own = parser.parse_args(arguments)
    configure_logging(rank=0)
    checkpoints = own.load
    if own.last is not None:
        if len(own.load) > 1:
            raise UserError(f"--last {own.last} is for the folder of one run, not {len(own.load)} folders")
        checkpoints = last_checkpoints(own.load[0], own.last)
    average(checkpoints, _weights(own, len(checkpoints)), own.save, own.params_dtype)


def _weights(own: argparse.Namespace, count: int) -> list[float]:
    if own.weights is not None and own.ema_decay is not None:
        raise UserError("--weights and --ema-decay both choose the weights: remove one")
    if own.ema_decay is not None:
        if not 0.0 <= own.ema_decay < 1.0:
            raise UserError(f"--ema-decay {own.ema_decay}: pass a number from 0 to below 1")
        return moving_average(count, own.ema_decay)
    weights = [1.0] * count if own.weights is None else own.weights
    if len(weights) != count:
        raise UserError(f"--weights has {len(weights)} numbers for {count} checkpoints: pass one for each")
    if not sum(weights) > 0.0 or not all(0.0 <= weight < float("inf") for weight in weights):
        raise UserError(f"--weights {' '.join(map(str, weights))}: pass numbers of at least 0, not all 0")
    return weights
