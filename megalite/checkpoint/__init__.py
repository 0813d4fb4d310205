"""Save and load checkpoints, and convert models of other programs."""
