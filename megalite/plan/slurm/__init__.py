"""Write a batch script for Slurm from a plan. The script starts the run, and restarts it until it is done."""
