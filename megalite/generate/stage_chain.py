"""Run a model whose layers are split over pipeline ranks, one stage after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.microbatch import Microbatch
from megalite.model.stage import Stage


def run_in_order(
    stage: Stage, microbatch: Microbatch, run: Callable[[Microbatch, Tensor | None], Tensor]
) -> Tensor:
    """Run a microbatch through this rank's stage, once the stages before it have run.

    Args:
        microbatch: the same on the ranks of all stages.
        run: maps the microbatch and the previous stage's output to the output, on the ranks of each stage.

    Returns:
        This rank's output. All stages but the last also send it to the next, ``[s, b, h]`` or wider.
    """
    pp, hidden = stage.context.topology.pp, None
    if not stage.is_first:
        b, s = microbatch.tokens.shape
        hidden = torch.empty(
            (s, b, stage.config.stage_output_size), dtype=stage.context.dtype, device=stage.context.device
        )
        dist.recv(hidden, pp.ranks[pp.rank - 1], group=pp.group)
    output = run(microbatch, hidden)
    if not stage.is_last:
        dist.send(output.contiguous(), pp.ranks[pp.rank + 1], group=pp.group)
    return output


def broadcast_from_last(x: Tensor, stage: Stage) -> Tensor:
    """Replace a tensor in place with that of the last stage, on the ranks of all stages; return it."""
    pp = stage.context.topology.pp
    if pp.size > 1:
        dist.broadcast(x, pp.ranks[-1], group=pp.group)
    return x
