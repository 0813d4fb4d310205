#!/usr/bin/env python
"""Run `megalite train-tokenizer` from a checkout: train a BPE or SentencePiece tokenizer."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("train-tokenizer")
