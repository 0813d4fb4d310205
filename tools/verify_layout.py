#!/usr/bin/env python
"""Shows that a config trains the same run in any layout.

python tools/verify_layout.py --config scripts/examples/tiny.yaml --layouts tp2,pp2,dp2,tp2pp2dp2

Runs the config for some iterations in each layout, on this machine's CPU, and on one rank, and prints the
largest difference of loss and gradient. All flags of pretrain_gpt.py are understood; with --params-dtype fp64
what is left of differences is around 1e-13. Without --data-path the tokens are random. Exit status 1 where a
layout trains another run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from megalite.cli import parse, run_main
from megalite.cli.tool import ToolParser, positive_int
from megalite.log import configure_logging, log
from megalite.verify.layout import TABLE, Layout
from megalite.verify.report import verify_layouts

_LAYOUTS = """names with commas: sizes of tp, pp, dp and mbs, with v2 (chunks), zb, zbv or gpipe after pp, and
switches after a plus: tp2pp2, pp4zb, tp2pp2v2dp2+sp+zero1+gather+full; 'all' for every technique"""


def main(arguments: Sequence[str]) -> None:
    """Reads the tool's own flags, leaves the rest to the config, and exits by the verdict."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--layouts", default="tp2,pp2,dp2", help=_LAYOUTS)
    parser.add_argument("--iterations", type=positive_int, default=5, help="iterations of a run (default 5)")
    parser.add_argument("--worst", type=positive_int, default=1, help="parameters shown of each (default 1)")
    own, rest = parser.parse_known_args(arguments)
    configure_logging(rank=0)
    config, notices = parse(rest, unneeded=("train_iters", "mock_data"))
    for notice in notices:
        log.warning(notice)
    if not config.training.is_counted_in_samples:
        num_iterations = max(own.iterations, config.training.train_iters or 0)
        config = replace(config, training=replace(config.training, train_iters=num_iterations))
    if not config.data.data_path:
        config = replace(config, data=replace(config.data, mock_data=True))
    layouts = [Layout.parse(name) for name in (TABLE if own.layouts == "all" else own.layouts.split(","))]
    sys.exit(0 if verify_layouts(config, layouts, own.iterations, own.worst) else 1)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
