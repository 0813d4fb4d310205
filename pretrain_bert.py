#!/usr/bin/env python
"""Train a BERT model; under torchrun, on many ranks. `megalite train-bert` is the same."""

from megalite import pretrain

if __name__ == "__main__":
    pretrain(architecture="bert")
