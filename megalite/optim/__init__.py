"""Flat gradient buffers, their reduction over data-parallel ranks, clipping, AdamW and the learning rate."""
