r"""A pretraining script of Megatron's, translated: its model, loss, own arguments and defaults.

torchrun --nproc-per-node 4 examples/from_megatron.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --train-iters 20 --lr 1e-3 --global-batch-size 8 --micro-batch-size 2 --eod-weight 0.1
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import megalite

DEFAULTS = ["--lr-decay-style", "cosine"]  # Megatron's args_defaults
EOD = 0


def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's own arguments: the function is as it was."""
    parser.add_argument("--eod-weight", type=float, default=1.0)
    return parser


class EodGPT(megalite.GPT):
    """Count the loss of end-of-document tokens less: Megatron's model_provider and loss_func."""

    eod_weight = 1.0

    def losses(self, normed: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        """Return the sum of the losses of a microbatch's tokens."""
        labels = microbatch.labels.t()  # [s, b]
        loss = self.losses_of(normed, labels)
        return self.masked_sum(torch.where(labels == EOD, self.eod_weight * loss, loss), microbatch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own, flags = extra_args_provider(parser).parse_known_args()
    EodGPT.eod_weight = own.eod_weight
    sys.argv[1:] = [*DEFAULTS, "--override-flags", *flags]  # what the user passes replaces the defaults
    megalite.pretrain(EodGPT)
