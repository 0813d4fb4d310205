"""A batch script for Slurm from a plan: it starts the run, and restarts it until it is done."""
