"""Errors, safe file access, logging, and private names of torch: what every package may import."""
