#!/usr/bin/env python
"""Let a new virtual environment import the packages of the one that made it.

PYTHON scripts/add_parent_packages.py .venv/bin/python

`python -m venv --system-site-packages` gives the new environment the packages of PYTHON's base. If PYTHON is
the interpreter of a virtual environment itself, as in many images for GPUs, its own packages are not among
them. Needs Python's standard library alone: scripts/install.sh runs it before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "parent_environment.pth"
"""Python reads such a file at its start: it also reads the parent's own files of this kind."""


def main(python: str) -> None:
    """Write the file, if this interpreter is of a virtual environment."""
    if sys.prefix == sys.base_prefix:
        return
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (Path(site) / NAME).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
