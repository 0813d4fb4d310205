"""Pretraining of GPT-like language models with tensor, pipeline and data parallelism."""

__version__ = "0.1.0"
