"""Dry run: run one rank's real training iteration on meta tensors, and count its memory and messages."""
