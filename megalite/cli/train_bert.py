"""Train a BERT model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 -m megalite train-bert --preset bert-base --tp 2 --pp 2 --data-path PREFIX …
"""

from functools import partial

from megalite.pretraining import pretrain

main = partial(pretrain, "bert")
