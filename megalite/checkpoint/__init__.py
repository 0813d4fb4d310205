"""A model on disk: checkpoints, and the names and shapes that other programs give its weights."""
