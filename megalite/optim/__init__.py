"""Gradient buckets, ZeRO stages, AdamW with clipping and loss scaling, and learning-rate schedules."""
