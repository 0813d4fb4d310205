"""Write a job file for Kubernetes from a plan: a PyTorchJob, which restarts the run until it is done."""
