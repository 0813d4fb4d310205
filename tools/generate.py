#!/usr/bin/env python
"""Run `megalite generate` from a checkout: continue prompts with a trained model."""

from megalite.__main__ import run_command

if __name__ == "__main__":
    run_command("generate")
