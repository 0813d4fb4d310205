#!/usr/bin/env python
"""Let a new virtual environment import the packages of the one that made it.

PYTHON scripts/add_parent_packages.py .venv/bin/python

`python -m venv --system-site-packages` gives the new environment the packages of PYTHON's base. If PYTHON is
itself in a virtual environment, as in many GPU images, this does not include PYTHON's own packages. The
script only needs Python's standard library, since scripts/install.sh runs it before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "parent_environment.pth"
"""Python reads files of this kind when it starts, including the parent's own files."""


def main(python: str) -> None:
    """Write the file, if this interpreter is in a virtual environment."""
    if sys.prefix == sys.base_prefix:
        return
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (Path(site) / NAME).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
