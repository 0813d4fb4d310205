"""The planner's best layouts, run for real on this machine for a few iterations."""
