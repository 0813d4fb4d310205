"""From a plan to a job: a batch script that starts a run on a Slurm cluster and keeps it going."""
