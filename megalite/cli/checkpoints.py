"""Convert, inspect, average and upcycle checkpoints."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.convert import upcycle as upcycling
from megalite.checkpoint.convert.average import average, last_checkpoints, moving_average
from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.formats import KINDS, TARGETS
from megalite.checkpoint.convert.model_settings import Settings
from megalite.checkpoint.stored_run import CopiedParts, StoredRun, local_copy, run_at
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.observe.report import checkpoint_inspection
from megalite.observe.report.checkpoint_inspection import open_view
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def convert(arguments: Sequence[str]) -> None:
    """Convert a model between megalite, Hugging Face, Megatron-LM and Megatron-DeepSpeed.

    megalite convert --load CHECKPOINTS --save HF_FOLDER
    megalite convert --load HF_FOLDER --save CHECKPOINTS
    megalite convert --load MEGATRON_FOLDER --save HF_FOLDER --to hf

    The format of --load is detected. A megalite checkpoint is converted to a Hugging Face folder;
    docs/checkpoints.md lists the families of models. Any other format is converted to a megalite checkpoint
    with weights only, for `megalite train --load … --finetune`. Flags of megalite train for the model, its
    precision (--params-dtype) and its tokenizer override the source's own description; a source without a
    description needs them. If one of the formats is Hugging Face's, both models then run on the same tokens
    (this needs transformers). If their outputs differ, the tool names the first layer that differs, and
    writes nothing.
    """
    parser = ToolParser(description=convert.__doc__)
    add = parser.add_argument
    add("--load", type=run_at, required=True, metavar="FOLDER", help="checkpoint to convert")
    add("--save", type=local_path, required=True, metavar="FOLDER", help="new folder to write")
    add("--from", dest="source", choices=sorted(KINDS), help="format of --load; detected by default")
    add(
        "--to",
        dest="target",
        choices=sorted(TARGETS),
        help="format of --save; by default hf from megalite, else megalite",
    )
    add("--load-iteration", type=int, metavar="N", help="iteration of the checkpoint; by default the latest")
    add("--max-shard-size", type=_size, default="5GB", metavar="5GB", help="largest Hugging Face file")
    add(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not run both models on the same tokens and compare them before the folder gets its name",
    )
    add("--ema", action="store_true", help="convert the average of the weights, of a run with --ema-decay")
    own, rest = parser.parse_known_args(arguments)
    configure_logging(rank=0)
    with local_copy(own.load, own.load_iteration) as folder:
        Conversion(
            *(folder, own.save, own.source, own.target, own.load_iteration, own.max_shard_size),
            *(Settings(rest), own.check, own.ema),
        ).run()


def _size(text: str) -> int:
    """Parse a number of bytes, such as 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)b?", text.lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 5GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2]])


def inspect(arguments: Sequence[str]) -> None:
    """Show what a checkpoint contains, whether it is complete, and how it differs from another.

    megalite inspect CHECKPOINTS
    megalite inspect CHECKPOINTS --load-iteration 100 --verify --norms
    megalite inspect CHECKPOINTS/iter_0000100 --diff OTHER/iter_0000100

    FOLDER is a run's folder of checkpoints, one checkpoint, or a Hugging Face folder. The exit status is 1 if
    the checkpoint is damaged, or if --diff finds a difference in progress, model, run or tensors. The layouts
    and versions that saved the checkpoints do not matter.
    """
    parser = ToolParser(description=inspect.__doc__)
    add = parser.add_argument
    add("folder", type=run_at, metavar="FOLDER", help="checkpoint to inspect")
    add("--load-iteration", type=int, metavar="N", help="iteration in a run's folder; by default the latest")
    add("--verify", action="store_true", help="read every byte and compare it with SHA256SUMS")
    add("--norms", action="store_true", help="show norm, extremes, NaN and infinities of each tensor")
    add("--json", action="store_true", help="print one JSON object")
    add("--diff", type=run_at, metavar="OTHER", help="compare with the checkpoint in this folder")
    flags = parser.parse_args(arguments)
    configure_logging(rank=0, stream=sys.stderr)  # progress: standard output has the report alone
    sys.exit(0 if (_difference(flags) if flags.diff else _report(flags)) else 1)


def _report(flags: argparse.Namespace) -> bool:
    """Print one checkpoint; return whether it is undamaged."""
    parts: CopiedParts = "all" if flags.verify or flags.norms else "headers"
    with local_copy(flags.folder, flags.load_iteration, parts=parts) as folder:
        view = open_view(folder, flags.load_iteration)
        report = checkpoint_inspection.inspect(view, verify=flags.verify, norms=flags.norms)
    if isinstance(flags.folder, StoredRun):
        report = replace(report, folder=f"{flags.folder}/{Path(report.folder).name}")
    print(json.dumps(report.record()) if flags.json else "\n".join(checkpoint_inspection.lines_of(report)))
    return not report.damage


def _difference(flags: argparse.Namespace) -> bool:
    """Print the difference between two checkpoints; return whether they are equal."""
    if flags.verify or flags.norms:
        raise UserError("--verify and --norms are for one checkpoint: remove them, or --diff")
    both = flags.folder, flags.diff
    with ExitStack() as copies:
        folders = [copies.enter_context(local_copy(each, flags.load_iteration)) for each in both]
        views = [open_view(folder, flags.load_iteration) for folder in folders]
        comparison = checkpoint_inspection.compare(*views)
    lines = comparison.lines()
    print(json.dumps(comparison.record()) if flags.json else "\n".join(lines))
    return comparison.is_equal


def merge_checkpoints(arguments: Sequence[str]) -> None:
    """Average the weights of checkpoints of one model.

    megalite merge-checkpoints --load CHECKPOINTS --last 5 --save AVERAGE
    megalite merge-checkpoints --load CHECKPOINTS --last 5 --ema-decay 0.8 --save AVERAGE
    megalite merge-checkpoints --load RUN_A RUN_B/iter_0001000 --weights 0.7 0.3 --save AVERAGE

    --load names folders of runs, of which the latest checkpoint is read, or of single checkpoints, saved in
    any layout. The new checkpoint holds only weights. Evaluate it, convert it, or train from it with
    --finetune.
    """
    parser = ToolParser(description=merge_checkpoints.__doc__)
    add = parser.add_argument
    add("--load", type=run_at, nargs="+", required=True, metavar="FOLDER", help="checkpoints to average")
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
    if own.last is not None and len(own.load) > 1:
        raise UserError(f"--last {own.last} is for the folder of one run, not {len(own.load)} folders")
    with ExitStack() as copies:
        checkpoints = [copies.enter_context(local_copy(each, last=own.last or 1)) for each in own.load]
        if own.last is not None:
            checkpoints = last_checkpoints(checkpoints[0], own.last)
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


def upcycle(arguments: Sequence[str]) -> None:
    """Make a model with experts from a dense checkpoint, with the same outputs.

    megalite upcycle --load DENSE --num-experts 8 --moe-router-topk 2 --save EXPERTS
    megalite upcycle --load DENSE --num-experts 32 --moe-router-topk 8 --granularity 4 --save EXPERTS

    Each expert is a copy of the layer's MLP, or one of --granularity slices of its width. --load names the
    folder of a run, of which the latest checkpoint is read, or of a single checkpoint, saved in any layout.
    The new checkpoint holds only weights. Train from it with --finetune --use-checkpoint-args.
    """
    parser = ToolParser(description=upcycle.__doc__)
    add = parser.add_argument
    add("--load", type=run_at, required=True, metavar="FOLDER", help="dense checkpoint")
    add("--save", type=local_path, required=True, metavar="FOLDER", help="new folder to write")
    add("--num-experts", type=positive_int, required=True, metavar="E", help="experts of a layer")
    add(
        "--moe-router-topk",
        type=positive_int,
        default=2,
        metavar="K",
        help="experts of a token, 2 by default",
    )
    add(
        "--granularity",
        type=positive_int,
        default=1,
        metavar="G",
        help="cut the width of each MLP into G experts; G must divide E and K",
    )
    add("--seed", type=positive_int, default=1234, metavar="S", help="seed of the routers' weights")
    own = parser.parse_args(arguments)
    configure_logging(rank=0)
    sizes = upcycling.ExpertSizes(own.num_experts, own.moe_router_topk, own.granularity)
    with local_copy(own.load) as folder:
        upcycling.upcycle(folder, sizes, own.save, own.seed)
