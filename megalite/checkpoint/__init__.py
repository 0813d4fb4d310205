"""Save and load checkpoints, and convert models from and to other programs."""
