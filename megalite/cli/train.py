"""Train a GPT, BLOOM or Llama-like model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 -m megalite train --preset gpt2-124m --tp 2 --pp 2 --data-path PREFIX …
"""

from collections.abc import Sequence

from megalite.pretraining import pretrain


def main(arguments: Sequence[str]) -> None:
    """Run one rank of the training that the arguments describe."""
    pretrain(arguments=arguments)
