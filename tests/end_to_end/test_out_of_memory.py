"""A run that the machine has no memory for ends with what took it and what would help."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KIB = 8_000_000
"""Of address space, of which the libraries alone map some."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to RLIMIT_AS")
def test_memory_that_runs_out_in_a_step() -> None:
    flags = "--preset gpt2-124m --micro-batch-size 32 --mock-data --train-iters 2 --lr 1e-4 --eval-iters 0"
    ran = subprocess.run(
        ["bash", "-c", f'ulimit -v {KIB}; exec "$@"', "-", sys.executable, "pretrain_gpt.py", *flags.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert resource.getrlimit(resource.RLIMIT_AS) == (resource.RLIM_INFINITY,) * 2
    assert ran.returncode == 1, ran.stderr
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: rank 0 (pp 0 of 1, dp 0 of 1, tp 0 of 1) ran out of memory")
    assert f"the process can use {KIB * 1024 / 1e9:.2f} GB" in errors[0]
    assert "the planned memory of this rank is" in errors[1]
    assert "--recompute-granularity full would save" in errors[2]
    assert "--micro-batch-size 16 would save" in " ".join(errors[3:])
    assert "Traceback" not in ran.stderr
