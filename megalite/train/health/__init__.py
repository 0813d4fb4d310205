"""Ranks that hang or lag: who waits for whom, and what each was doing."""
