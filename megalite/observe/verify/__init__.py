"""Verify that a config trains the same run in any layout."""
