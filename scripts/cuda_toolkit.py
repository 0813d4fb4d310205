#!/usr/bin/env python
"""Find the CUDA compiler that builds the CUDA operators: setup.py and scripts/install.sh use it.

python scripts/cuda_toolkit.py 13.0        print nvcc's path; if there is none, the reason, and exit with 1

It only needs Python's standard library, since it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import NamedTuple

ROOTS = "/usr/local/cuda*"
"""Where NVIDIA's own installers put toolkits."""


class Toolkit(NamedTuple):
    """A CUDA compiler, with its headers and libraries.

    Attributes:
        release: nvcc's release, such as (13, 0).
        include_dirs: folders of headers that nvcc does not find by itself.
        library_dirs: folders with `libcudart_static.a`.
    """

    nvcc: str
    release: tuple[int, int]
    include_dirs: list[str]
    library_dirs: list[str]


def find_toolkit(torch_cuda: str) -> Toolkit:
    """Return the first toolkit that can build for a torch of this CUDA version.

    A driver that is new enough for torch may be too old for a toolkit of a later major version.

    Args:
        torch_cuda: `torch.version.cuda`, such as "13.0".

    Raises:
        LookupError: there is none; the message gives the reason, and completes "as ...".
    """
    major = int(torch_cuda.split(".")[0])
    problems = []
    for nvcc in dict.fromkeys(_compilers()):
        toolkit = _toolkit(nvcc)
        if toolkit is None:
            problems.append(f"{nvcc} does not run")
        elif toolkit.release[0] > major:
            problems.append(f"nvcc has CUDA {toolkit.release[0]} and torch has CUDA {major} ({nvcc})")
        else:
            return toolkit
    raise LookupError(problems[0] if problems else f"there is no nvcc for CUDA {major}")


def _compilers() -> Iterator[str]:
    """Yield paths of nvcc: only CUDA_HOME's or CUDA_PATH's, else from PATH, ROOTS and Python's packages."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        yield from _in(Path(home))
        return
    if found := shutil.which("nvcc"):
        yield found

    def newer(root: str) -> tuple[bool, list[int]]:  # the link without a number is the machine's default
        return root.endswith("cuda"), [int(part) for part in re.findall(r"\d+", root)]

    for root in sorted(glob(ROOTS), key=newer, reverse=True):
        yield from _in(Path(root))
    for folder in _packages():
        yield from _in(folder)


def _in(folder: Path) -> Iterator[str]:
    if found := shutil.which("nvcc", path=str(folder / "bin")):
        yield found


def _packages() -> list[Path]:
    """Return the folders of NVIDIA's packages for Python from CUDA 13 on, such as `.../nvidia/cu13`."""
    return [folder for path in sys.path for folder in sorted(Path(path or ".").glob("nvidia/cu[0-9]*"))]


def _toolkit(nvcc: str) -> Toolkit | None:
    """Ask a compiler for its release and folder, so that links and wrapper scripts work too."""
    version, dry_run = (
        subprocess.run([nvcc, *options], capture_output=True, text=True)
        for options in (["--version"], ["--dryrun", "-E", "none.cu"])
    )
    release = re.search(r"release (\d+)\.(\d+)", version.stdout)
    top = re.search(r"TOP=(.+)", dry_run.stderr)
    if release is None or top is None:
        return None
    folder = Path(top[1]).resolve()
    # The compiler's package and the runtime's, which torch needs too, may be in different site-packages.
    others = []
    if folder.parent.name == "nvidia":
        others = [each for each in _packages() if each.name == folder.name and each.resolve() != folder]
    include_dirs = [
        str(each / "include") for each in others if (each / "include" / "cuda_runtime.h").exists()
    ]
    libraries = [each / name for each in (folder, *others) for name in ("lib64", "lib")]
    library_dirs = [str(each) for each in libraries if (each / "libcudart_static.a").exists()]
    return Toolkit(nvcc, (int(release[1]), int(release[2])), include_dirs, library_dirs)


if __name__ == "__main__":
    try:
        print(find_toolkit(sys.argv[1]).nvcc)
    except LookupError as error:
        sys.exit(str(error))
