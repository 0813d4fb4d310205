#!/usr/bin/env bash
# Install megalite with the named extras into .venv. scripts/quickstart.sh and scripts/test.sh call this script.
#   scripts/install.sh                    # the extras tokenizers,tensorboard,report
#   scripts/install.sh test               # other extras; "" for none
# If python3 can already import torch (as on many GPU clusters), that torch is used, also if python3 is a virtual
# environment. PYTHON selects another interpreter, TORCH_VERSION the torch to install if there is none. Without a
# network it works if all requirements can be imported.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1-tokenizers,tensorboard,report}
python=${PYTHON:-python3}
torch_version=${TORCH_VERSION:-2.13.0}

say() { printf '\n== %s\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'; then
  echo "error: Python 3.10 to 3.13 is required, and $python is $("$python" --version 2>&1): set PYTHON to another interpreter" >&2
  exit 1
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "error: no C++ compiler: install one (Debian: apt-get install g++), or set CXX" >&2
  exit 1
fi

if [ ! -x .venv/bin/python ]; then
  if "$python" -c 'import torch' 2>/dev/null; then
    say "Creating .venv with the torch that $python can import"
    "$python" -m venv --system-site-packages .venv
    "$python" scripts/add_parent_packages.py .venv/bin/python
  else
    say "Creating .venv"
    "$python" -m venv .venv
  fi
fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  say "Installing torch $torch_version"
  .venv/bin/python -m pip install --quiet "torch==$torch_version"
fi
if [ ! -x .venv/bin/torchrun ]; then # torch is not in .venv, and the torchrun beside it runs another python
  printf '#!/bin/sh\nexec "%s/.venv/bin/python" -m torch.distributed.run "$@"\n' "$PWD" >.venv/bin/torchrun
  chmod +x .venv/bin/torchrun
fi
cuda=$(.venv/bin/python -c 'import torch; print(torch.version.cuda or "")')
if [ -n "$cuda" ] && ! missing=$(.venv/bin/python scripts/cuda_toolkit.py "$cuda" 2>&1); then
  if [ "${cuda%%.*}" -ge 13 ]; then # before CUDA 13 the packages hold no nvcc
    say "Installing the CUDA compiler from Python packages: $missing"
    .venv/bin/python -m pip install --quiet nvidia-cuda-{nvcc,crt,runtime}=="$cuda.*" nvidia-nvvm=="$cuda.*" ||
      echo "warning: no CUDA compiler: torch.compile and Triton replace the CUDA operators; install CUDA $cuda's toolkit or set CUDA_HOME" >&2
  else
    echo "warning: $missing: torch.compile and Triton replace the CUDA operators; install CUDA $cuda's toolkit or set CUDA_HOME" >&2
  fi
fi
say "Building and installing megalite with extras: $extras"
.venv/bin/python -m pip install --quiet 'setuptools>=77.0.3' wheel 'pybind11>=2.13' ninja numpy
.venv/bin/python -m pip install --quiet --no-build-isolation --editable ".${extras:+[$extras]}" || {
  echo "error: not installed, for the reason above; without a network, all that megalite${extras:+[$extras]} requires must be installed already" >&2
  exit 1
}
