"""Train a BERT model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 -m megalite train-bert --preset bert-base --tp 2 --pp 2 --data-path PREFIX …
"""

from collections.abc import Sequence

from megalite.cli.train import pretrain


def main(arguments: Sequence[str]) -> None:
    """Run one rank of the training that the arguments describe."""
    pretrain(architecture="bert", arguments=arguments)
