#!/usr/bin/env bash
# Install megalite with the named extras into .venv. scripts/quickstart.sh and scripts/test.sh call this script.
#   scripts/install.sh tokenizers,tensorboard
# If python3 can already import torch (as on many GPU clusters), that torch is used. PYTHON selects another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=$1
python=${PYTHON:-python3}
torch_version=2.13.0

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
  else
    say "Creating .venv"
    "$python" -m venv .venv
  fi
fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  say "Installing torch $torch_version"
  .venv/bin/python -m pip install --quiet "torch==$torch_version"
fi
say "Building and installing megalite with extras: $extras"
.venv/bin/python -m pip install --quiet 'setuptools>=77.0.3' wheel 'pybind11>=2.13' ninja numpy
.venv/bin/python -m pip install --quiet --no-build-isolation --editable ".[$extras]"
