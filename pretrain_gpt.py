#!/usr/bin/env python
"""Train a GPT, BLOOM or Llama-like model; under torchrun, on many ranks. `megalite train` is the same."""

from megalite import pretrain

if __name__ == "__main__":
    pretrain()
