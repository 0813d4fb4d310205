"""Gradient buckets, ZeRO stages, and AdamW with clipping and loss scaling.

The sizes below are of the buffers of offloaded state. The planner reads them without torch, so that it starts
fast.
"""

RANGE_SIZE = 1 << 22
"""Number of elements to move and update at once: 16 MiB of each fp32 tensor."""
NUM_STAGED = 3
"""Number of ranges between device and host: one is copied down, one is updated, one is copied up."""
NUM_SLOTS = 4
"""Number of a file's ranges in memory: one is updated while others are read and written."""
