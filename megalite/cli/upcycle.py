"""Make a model with experts from a dense checkpoint, with the same outputs.

megalite upcycle --load DENSE --num-experts 8 --moe-router-topk 2 --save EXPERTS
megalite upcycle --load DENSE --num-experts 32 --moe-router-topk 8 --granularity 4 --save EXPERTS

Each expert is a copy of the layer's MLP, or one of --granularity slices of its width. --load names the folder
of a run, of which the latest checkpoint is read, or of a single checkpoint, saved in any layout. The new
checkpoint holds only weights. Train from it with --finetune --use-checkpoint-args.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.checkpoint.convert.upcycle import ExpertSizes, upcycle
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.utils.log import configure_logging


def main(arguments: Sequence[str]) -> None:
    """Upcycle a checkpoint."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("--load", type=local_path, required=True, metavar="FOLDER", help="dense checkpoint")
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
    sizes = ExpertSizes(own.num_experts, own.moe_router_topk, own.granularity)
    upcycle(own.load, sizes, own.save, own.seed)
