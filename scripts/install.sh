#!/usr/bin/env bash
# Install megalite with the named extras into .venv. scripts/quickstart.sh and scripts/test.sh call this script.
#   scripts/install.sh                    # the extras tokenizers,tensorboard
#   scripts/install.sh test               # other extras; "" for none
#   scripts/install.sh --replace-torch    # install torch even if there is one that megalite cannot use
# If python3 already has a torch (as on many GPU clusters), megalite uses it. Virtual environments work too. No step
# replaces that torch or its Triton: if megalite cannot use it, the script ends with one line that says what to type.
# PYTHON selects another interpreter, TORCH_VERSION a version of torch. Without a network it works if all requirements
# can be imported.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
extras=tokenizers,tensorboard
replace=
for argument in "$@"; do
  case $argument in
    --replace-torch) replace=1 ;;
    -*) echo "error: scripts/install.sh has no flag $argument: the one it has is --replace-torch" >&2; exit 1 ;;
    *) extras=$argument ;;
  esac
done
# For machines without a torch. CI runs all tests with this version, and the core tests with the other ones.
torch_version=${TORCH_VERSION:-2.13.0}

say() { printf '\n== %s\n' "$*"; }

pip_install() { # what there is of torch and Triton stays
  .venv/bin/python scripts/find_torch.py --pins >.venv/pins.txt
  .venv/bin/python -m pip install --quiet --constraint .venv/pins.txt "$@"
}

with_progress() { # run a command, and say every 15 seconds that it still runs
  local watcher status=0 start=$SECONDS
  # Ctrl-C does not reach the loop, so it ends with this script. A pipe that sleep held would outlast it.
  while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do echo "   still running, $((SECONDS - start)) s"; done &
  watcher=$!
  "$@" || status=$?
  kill "$watcher" 2>/dev/null || true
  wait "$watcher" 2>/dev/null || true
  return "$status"
}

if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'; then
  echo "error: Python 3.10 to 3.13 is required, and $python is $("$python" --version 2>&1): set PYTHON to another interpreter" >&2
  exit 1
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "error: no C++ compiler: install one (Debian: apt-get install g++), or set CXX" >&2
  exit 1
fi

having=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo "$python")
if ! torch=$("$having" scripts/find_torch.py ${TORCH_VERSION:+"$TORCH_VERSION"} 2>/dev/null); then
  if [ -z "$replace" ]; then
    echo "error: $torch: type scripts/install.sh --replace-torch to install torch $torch_version into .venv, or set PYTHON to another interpreter" >&2
    exit 1
  fi
  torch=
fi
if [ ! -x .venv/bin/python ]; then
  if [ -n "$torch" ]; then
    say "Creating .venv with the packages of $python"
    "$python" -m venv --system-site-packages .venv
    "$python" scripts/add_parent_packages.py .venv/bin/python
  else
    say "Creating .venv"
    "$python" -m venv .venv
  fi
fi
if [ -n "$torch" ]; then
  say "Using $torch"
else
  say "Installing torch $torch_version: builds with CUDA are a download of 3 GB"
  .venv/bin/python -m pip install "torch==$torch_version" # not quiet: it shows how far the download is
fi
if [ ! -x .venv/bin/torchrun ]; then # torch is not in .venv, and the torchrun beside it runs another python
  printf '#!/bin/sh\nexec "%s/.venv/bin/python" -m torch.distributed.run "$@"\n' "$PWD" >.venv/bin/torchrun
  chmod +x .venv/bin/torchrun
fi
cuda=$(.venv/bin/python -W ignore -c 'import torch; print(torch.version.cuda or "")')
if [ -n "$cuda" ] && ! missing=$(.venv/bin/python scripts/cuda_toolkit.py "$cuda" 2>&1); then
  if ! command -v nvidia-smi >/dev/null; then # they take longer to build than all the rest
    say "Without the CUDA operators: there is no NVIDIA driver, and $missing; to build them here, install CUDA $cuda's toolkit or set CUDA_HOME, and run this again"
  elif [ "${cuda%%.*}" -ge 13 ]; then # before CUDA 13 the packages hold no nvcc
    say "Installing the CUDA compiler from Python packages: $missing"
    pip_install nvidia-cuda-{nvcc,crt,runtime}=="$cuda.*" nvidia-nvvm=="$cuda.*" ||
      echo "warning: no CUDA compiler: torch.compile and Triton replace the CUDA operators; install CUDA $cuda's toolkit or set CUDA_HOME" >&2
  else
    echo "warning: $missing: torch.compile and Triton replace the CUDA operators; install CUDA $cuda's toolkit or set CUDA_HOME" >&2
  fi
fi
say "Building and installing megalite with extras: $extras (a few minutes)"
pip_install 'setuptools>=77.0.3' wheel 'pybind11>=2.13' ninja numpy
with_progress pip_install --no-build-isolation --editable ".${extras:+[$extras]}" || {
  echo "error: not installed, for the reason above; without a network, all that megalite${extras:+[$extras]} requires must be installed already" >&2
  exit 1
}
