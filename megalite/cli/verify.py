"""Verify that a config trains the same run in any layout.

megalite verify --config scripts/examples/tiny.yaml --layouts tp2,pp2,dp2,tp2pp2dp2

It runs the config for a few iterations in each layout and on one rank, and prints the largest differences in
loss and gradients. It uses this machine's CPU, or its GPUs with --distributed-backend nccl. It takes all
flags of megalite train; with --params-dtype fp64, differences are around 1e-13. Without --data-path, the
tokens are random. The exit status is 1 if a layout trains differently.

Each run also evaluates, with masks, and saves in its middle; the next layout resumes that save, and must
train the rest of the same run. --quick only trains.

If a layout trains differently, it is traced, and the first tensor that differs is named. --bisect traces the
layouts at once, without the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from megalite.config.option import flag_of
from megalite.distributed.axes import MODEL
from megalite.frontends.command_line import parse
from megalite.frontends.tool_parser import ToolParser, positive_int
from megalite.observe.verify.layouts import layouts_named
from megalite.observe.verify.verification import bisect_layouts, verify_layouts
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging, log_notes

_LAYOUTS = """names separated by commas: sizes of tp, pp, dp and mbs, with v2 (chunks), zb, zbv, dpv or gpipe
after pp, and switches after a plus: tp2pp2, pp4zb, tp2pp2v2dp2+sp+zero1+gather+full; 'default' tests each
technique once, and 'all' also combinations"""


def main(arguments: Sequence[str]) -> None:
    """Compare the layouts, and exit with status 1 if they differ. Other flags set the config."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--layouts", default="default", help=_LAYOUTS)
    parser.add_argument("--iterations", type=positive_int, default=5, help="iterations per run (default 5)")
    parser.add_argument("--worst", type=positive_int, help="parameters to show per layout (default 1)")
    parser.add_argument(
        "--bisect", action="store_true", help="only name the first tensor in which each layout differs"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only train: do not evaluate, and do not save and resume"
    )
    parser.add_argument(
        "--replay-routing",
        action="store_true",
        help="send tokens to the experts of the run on one rank, and count those that would go elsewhere",
    )
    own, rest = parser.parse_known_args(arguments)
    configure_logging(rank=0)
    config, notices = parse(rest, unneeded=("train_iters", "mock_data"))
    if not config.training.is_counted_in_samples:
        num_iterations = max(own.iterations, config.training.train_iters or 0)
        config = replace(config, training=replace(config.training, train_iters=num_iterations))
    if not config.data.data_path:
        config = replace(config, data=replace(config.data, mock_data=True))
    if own.replay_routing and not config.model.has_experts:
        raise UserError("--replay-routing has no effect without experts (--num-experts): remove it")
    if config.training.replay_routing_from is not None:
        raise UserError("--replay-routing-from has no effect on a comparison: pass --replay-routing instead")
    layouts = layouts_named(own.layouts, config)
    divided = [axis for axis in MODEL.axes if any(axis.name in layout.sizes for layout in layouts)]
    # These layouts use options without effect in a config whose axis has one rank.
    one_rank = tuple(f"{flag} is 1" for axis in divided for flag in (axis.flag, flag_of(axis.field)))
    log_notes(notice for notice in notices if not notice.endswith(one_rank))
    if own.bisect:
        if own.worst is not None:
            raise UserError("--worst has no effect with --bisect, which shows one tensor: remove it")
        if own.replay_routing:
            raise UserError("--replay-routing has no effect with --bisect, which traces layouts: remove one")
        if own.quick:
            raise UserError("--quick has no effect with --bisect, which only trains: remove it")
        is_same = bisect_layouts(config, layouts, own.iterations)
    else:
        is_same = verify_layouts(
            config,
            layouts,
            own.iterations,
            own.worst or 1,
            replays_routing=own.replay_routing,
            is_quick=own.quick,
        )
    sys.exit(0 if is_same else 1)
