"""Sizes of the buffers of offloaded optimizer state; without torch, so that the planner starts fast."""

RANGE_SIZE = 1 << 22
"""Elements of a state that are moved and updated at once: 16 MiB of each tensor in fp32."""
NUM_STAGED = 3
"""Ranges between device and host at once: one is copied down, one is updated, one is copied up."""
NUM_SLOTS = 4
"""Ranges of a file in memory at once: one is updated while others are read and written."""
