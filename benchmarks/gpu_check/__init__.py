"""Checks of a machine with GPUs, in stages: scripts/check_gpu.sh runs them, docs/gpu_check.md describes them."""
