#!/usr/bin/env python
"""Converts a model between megalite, Hugging Face, Megatron-LM and Megatron-DeepSpeed.

python tools/convert_checkpoint.py --load CHECKPOINTS --save HF_FOLDER
python tools/convert_checkpoint.py --load HF_FOLDER --save CHECKPOINTS
python tools/convert_checkpoint.py --load MEGATRON_FOLDER --save HF_FOLDER --to hf

What --load holds is found out. A checkpoint of megalite becomes a Hugging Face folder (GPT-2, BLOOM or
Llama), anything else a checkpoint of megalite with weights alone, for `pretrain_gpt.py --load … --finetune`.
Flags of pretrain_gpt.py that describe the model, its precision (--params-dtype) or its tokenizer are
understood, and stand over what the source says of itself; a source that says nothing needs them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, local_path
from megalite.convert.convert import Conversion
from megalite.convert.settings import Settings
from megalite.convert.source import KINDS
from megalite.convert.target import TARGETS
from megalite.log import configure_logging

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def main(arguments: Sequence[str]) -> None:
    """Reads the tool's own flags, leaves the rest to the config, and converts."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("--load", type=local_path, required=True, metavar="FOLDER", help="what to convert")
    add("--save", type=local_path, required=True, metavar="FOLDER", help="what to make: a new folder")
    add("--from", dest="source", choices=sorted(KINDS), help="what --load holds; by default found out")
    add("--to", dest="target", choices=sorted(TARGETS), help="by default hf from megalite, else megalite")
    add("--load-iteration", type=int, metavar="N", help="of the run; by default its latest")
    add("--max-shard-size", type=_size, default="5GB", metavar="5GB", help="of one Hugging Face file")
    own, rest = parser.parse_known_args(arguments)
    configure_logging(rank=0)
    Conversion(
        own.load, own.save, own.source, own.target, own.load_iteration, own.max_shard_size, Settings(rest)
    ).run()


def _size(text: str) -> int:
    """A number of bytes, as in 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)b?", text.lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 5GB and 500MB are some")
    return int(float(found[1]) * _UNITS[found[2]])


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
