"""Settings of a DeepSpeed JSON file."""
