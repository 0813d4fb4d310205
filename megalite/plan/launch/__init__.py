"""Write the job of a planned run for Slurm or Kubernetes; it restarts until the run is done."""
