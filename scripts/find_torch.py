#!/usr/bin/env python
"""Print the torch that an interpreter has, if megalite can use it: scripts/install.sh calls this script.

PYTHON scripts/find_torch.py              print the version and the folder; nothing if there is no torch
PYTHON scripts/find_torch.py 2.15.0       the same, but accept only this version
PYTHON scripts/find_torch.py --pins       print pip's constraints that keep this torch and its Triton

If megalite cannot use the torch, print the reason and exit with 1. Needs only Python's standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
import sys
from pathlib import Path

VERSIONS = runpy.run_path(str(Path(__file__).parents[1] / "megalite" / "utils" / "torch_versions.py"))


def release(version: str) -> str:
    """Return a version without its build suffix, such as ``+cu130``."""
    return version.split("+")[0]


def problem_of(version: str, wanted: str | None) -> str | None:
    """Return why megalite cannot use a torch of this version; None if it can."""
    if VERSIONS["is_too_old"](version):
        return f"is older than {VERSIONS['TESTED'][0]}, the oldest that megalite runs with"
    if wanted is not None and release(version) != release(wanted):
        return f"is there, and TORCH_VERSION requests {wanted}"
    return None


def pins() -> list[str]:
    """Return a constraint for each of torch and Triton that is installed."""
    lines = []
    for name in ("torch", "triton"):
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def describe(wanted: str | None) -> str:
    """Return the version and folder of the torch; empty if there is none.

    Raises:
        LookupError: megalite cannot use it.
    """
    if importlib.util.find_spec("torch") is None:
        return ""
    try:
        import torch
    except Exception as error:  # such as a missing library
        reason = str(error).splitlines()[0]
        raise LookupError(f"the torch of {sys.executable} cannot be imported ({reason})") from error
    found = f"torch {torch.__version__} in {Path(torch.__file__).parent}"
    if not any(pin.startswith("torch==") for pin in pins()):
        raise LookupError(f"{found} is not installed as a package, so pip would install another one")
    if problem := problem_of(torch.__version__, wanted):
        raise LookupError(f"{found} {problem}")
    return found


def main(arguments: list[str]) -> int:
    """Run the command line, and return the exit status."""
    if arguments == ["--pins"]:
        print(*pins(), sep="\n")
        return 0
    try:
        print(describe(*(arguments or [None])))
    except LookupError as problem:
        print(problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
