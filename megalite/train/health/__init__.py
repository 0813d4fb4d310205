"""Find ranks that hang or are slow."""
