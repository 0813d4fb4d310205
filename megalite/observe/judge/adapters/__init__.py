"""Adapters: a file for each package whose programs can be judged."""
