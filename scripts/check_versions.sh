#!/usr/bin/env bash
# Run the core tests with a Python and a torch, from a copy of the repository with an environment of its own.
#   scripts/check_versions.sh python3.12 2.11.0
#   scripts/check_versions.sh python3.12 2.11.0 -k kernels   # further arguments go to pytest
# The core tests are those of the units and of forked ranks, a run of the program, and the levels of the packages.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "$1")
version=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from - | tar --extract --directory "$work"
cd "$work"
PYTHON=$python TORCH_VERSION=$version scripts/test.sh -q tests/test_architecture.py tests/unit tests/ranks tests/end_to_end/test_runs.py "$@"
.venv/bin/python - "$version" <<'END'
import sys, torch

assert torch.__version__.split("+")[0] == sys.argv[1], f"the tests ran with torch {torch.__version__}"
print(f"passed: Python {sys.version.split()[0]}, torch {torch.__version__}")
END
