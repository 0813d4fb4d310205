"""Checks of a machine with GPUs, in stages, which scripts/check_gpu.sh runs: see docs/gpu_check.md."""
