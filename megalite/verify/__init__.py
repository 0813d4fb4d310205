"""Proof that a run is the same in any layout, on a user's own config."""
