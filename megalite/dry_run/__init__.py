"""Dry run: run one rank's real training iteration on meta tensors, and count what it holds and sends."""
