"""Tensor parallelism by hand: collectives in pairs, shards, layers, loss, and random numbers by counter."""
