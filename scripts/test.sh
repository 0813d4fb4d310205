#!/usr/bin/env bash
# Install the test dependencies into .venv and run all tests except the slow ones. Arguments are passed to pytest.
#   scripts/test.sh -k layout
#   scripts/test.sh -m slow      # the slow tests; .ci/run runs a part of them
#   scripts/test.sh -n 0 --pdb   # in one process; by default two share the tests
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh test
.venv/bin/python -m pip install --quiet --no-deps --requirement tests/requirements-nodeps.txt
printf '\n== Running the tests\n'
exec .venv/bin/python -m pytest -n 2 "$@"
