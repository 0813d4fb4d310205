"""A run's report: what it left behind, read and drawn as one page."""
