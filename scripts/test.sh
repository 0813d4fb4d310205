#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them, all but the long tables; further arguments go to pytest.
#   scripts/test.sh -k layout
#   scripts/test.sh -m slow      # the long tables, which .ci/run runs besides
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh test
.venv/bin/python -m pip install --quiet --no-deps --requirement tests/requirements-nodeps.txt
printf '\n== Running the tests\n'
exec .venv/bin/python -m pytest "$@"
