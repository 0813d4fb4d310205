"""Adapters: one file for each package whose programs can be judged. Each imports its package when it is named."""
