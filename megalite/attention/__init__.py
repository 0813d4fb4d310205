"""Attention: kernels and their algebra, exchanges between ranks, and the core that a stage's layers share."""
