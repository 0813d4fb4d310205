"""The report page of a run, and the inspection and comparison of checkpoints."""
