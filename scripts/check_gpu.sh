#!/usr/bin/env bash
# Check a machine with GPUs: versions, kernels, numbers, speed, faults. docs/gpu_check.md describes the stages.
#   scripts/check_gpu.sh [--out FOLDER] [--stage N ...] [--minutes M] [--resume]
#   scripts/check_gpu.sh --links [flags of torchrun]   # over several nodes: on each, as a step of Slurm or with --nnodes …
# Needs no network. Runs in .venv if it is there, else in the environment of PYTHON (default: python3), which must
# hold torch and what builds megalite: numpy, pyyaml, safetensors, pybind11, setuptools, and pytest with hypothesis.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
python=${PYTHON:-python3}
[ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m benchmarks.gpu_check "$@"
