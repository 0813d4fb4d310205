#!/usr/bin/env bash
# Combine the coverage that the unit tests of several jobs have recorded in .coverage.*, and report it by file.
#   scripts/report_coverage.sh      # in CI also on the page of the run
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/python -m pip install --quiet "$(sed -n 's/^ *"\(pytest-cov==[^"]*\)".*/\1/p' pyproject.toml)"
.venv/bin/python -m coverage combine --keep
.venv/bin/python -m coverage report --format=markdown | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
