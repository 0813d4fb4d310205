"""What is in a checkpoint, what is damaged, and how two of them differ."""
