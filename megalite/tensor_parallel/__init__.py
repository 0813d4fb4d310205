"""Tensor parallelism with explicit collectives: shards, layers, loss, and counter-based random numbers."""
