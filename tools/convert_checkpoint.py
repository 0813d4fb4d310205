#!/usr/bin/env python
"""Run `megalite convert` from a checkout: convert a checkpoint of Hugging Face or Megatron-LM."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("convert")
