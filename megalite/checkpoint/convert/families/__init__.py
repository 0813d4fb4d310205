"""Architectures of transformers, one file each: the mapping of its config, and of its tensors."""
