#!/usr/bin/env bash
# Installs megalite and the named extras into .venv (scripts/quickstart.sh and scripts/test.sh call it).
#   scripts/install.sh tokenizers,tensorboard
# A torch that python3 can import already (a GPU cluster's own) is used as it is; PYTHON names another python3.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=$1
python=${PYTHON:-python3}
torch_version=2.13.0

say() { printf '\n== %s\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'; then
  echo "error: $("$python" --version 2>&1) is not Python 3.10 to 3.13: set PYTHON to one that is" >&2
  exit 1
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "error: no C++ compiler: install one (Debian: apt-get install g++), or set CXX" >&2
  exit 1
fi

if [ ! -x .venv/bin/python ]; then
  if "$python" -c 'import torch' 2>/dev/null; then
    say "Making .venv on top of the torch that $python has"
    "$python" -m venv --system-site-packages .venv
  else
    say "Making .venv"
    "$python" -m venv .venv
  fi
fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  say "Installing torch $torch_version"
  .venv/bin/python -m pip install --quiet "torch==$torch_version"
fi
say "Building megalite and installing it with [$extras]"
.venv/bin/python -m pip install --quiet 'setuptools>=77.0.3' wheel 'pybind11>=2.13' ninja numpy
.venv/bin/python -m pip install --quiet --no-build-isolation --editable ".[$extras]"
