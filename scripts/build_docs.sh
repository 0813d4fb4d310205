#!/usr/bin/env bash
# Build the site of the documentation in build/site, and check its links. It installs MkDocs into .venv-docs.
#   scripts/build_docs.sh
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv-docs/bin/python ] || "${PYTHON:-python3}" -m venv .venv-docs
.venv-docs/bin/python -m pip install --quiet --requirement docs/requirements.txt
export PATH=$PWD/.venv-docs/bin:$PATH  # with ruff, which formats the signatures
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet --strict
python -m docs.make.check_site build/site
