"""Gradient buckets, ZeRO stages, and AdamW with clipping and loss scaling."""
