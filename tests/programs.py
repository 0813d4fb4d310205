"""Programs of the repository, run in a forked process that has torch already: its import takes seconds."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megalite.distributed.local_ranks import forked_with_torch

ROOT = Path(__file__).parents[1]


def run_program(path: str, *arguments: object, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run what ``python PATH ARGUMENTS`` runs in the repository's folder, on a CPU."""
    context = forked_with_torch(__name__)
    line = [path, *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="megalite-program-") as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = context.Process(target=_main, args=(line, [str(output) for output in outputs]))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(line, timeout)
        texts = [output.read_text() for output in outputs]
    assert process.exitcode is not None
    return subprocess.CompletedProcess(line, process.exitcode, *texts)


def _main(line: Sequence[str], outputs: Sequence[str]) -> None:
    for stream, output in zip((sys.stdout, sys.stderr), outputs, strict=True):
        stream.flush()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.chdir(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = list(line)
    sys.path.insert(0, str((ROOT / line[0]).parent))
    runpy.run_path(line[0], run_name="__main__")
