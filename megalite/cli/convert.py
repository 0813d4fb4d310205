"""Convert a model between megalite, Hugging Face, Megatron-LM and Megatron-DeepSpeed.

megalite convert --load CHECKPOINTS --save HF_FOLDER
megalite convert --load HF_FOLDER --save CHECKPOINTS
megalite convert --load MEGATRON_FOLDER --save HF_FOLDER --to hf

The format of --load is detected. A megalite checkpoint is converted to a Hugging Face folder;
docs/checkpoints.md lists the families of models. Any other format is converted to a megalite checkpoint with
weights only, for `megalite train --load … --finetune`. Flags of megalite train for the model, its precision
(--params-dtype) and its tokenizer override the source's own description; a source without a description
needs them.
If one of the formats is Hugging Face's, both models then run on the same tokens (this needs transformers). If
their outputs differ, the tool names the first layer that differs, and writes nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.model_settings import Settings
from megalite.checkpoint.convert.source import KINDS
from megalite.checkpoint.convert.target import TARGETS
from megalite.frontends.tool_parser import ToolParser, local_path
from megalite.utils.log import configure_logging

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def main(arguments: Sequence[str]) -> None:
    """Convert a model. Flags that the tool does not know set the config."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("--load", type=local_path, required=True, metavar="FOLDER", help="checkpoint to convert")
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
    Conversion(
        *(own.load, own.save, own.source, own.target, own.load_iteration, own.max_shard_size),
        *(Settings(rest), own.check, own.ema),
    ).run()


def _size(text: str) -> int:
    """Parse a number of bytes, such as 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)b?", text.lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 5GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2]])
