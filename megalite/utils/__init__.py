"""Errors, safe file access, logging, hardware, and private names of torch: what every package may import."""
