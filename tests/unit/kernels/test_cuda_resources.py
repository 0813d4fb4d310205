"""Registers and spills of the CUDA kernels, as nvcc reports them for Hopper. No GPU is needed."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.kernels.posing import ROOT

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

LIMITS = {
    "adamw": (78, 0),
    "add_norm": (121, 0),
    "cross_entropy": (64, 0),
    "dropout": (80, 0),
    "dropout_add": (76, 0),
    "gelu": (80, 0),
    "norm": (90, 8),
    "normal": (60, 0),
    "rotary": (198, 0),
    "softmax": (64, 0),
    "swiglu": (114, 0),
}
"""Registers of a thread and bytes that it spills, the most of all kernels of a file, with nvcc 13.0."""
MARGIN = 1.1
"""for the registers with other releases of nvcc"""
FAST = {"cross_entropy"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LIMITS]
)
def test_kernels_keep_to_their_registers(name: str, tmp_path: Path) -> None:
    flags = re.search(r"^NVCC_FLAGS = (.+)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert flags
    source, target = ROOT / "csrc" / "cuda" / f"{name}.cu", tmp_path / f"{name}.cubin"
    command = [
        "nvcc",
        *ast.literal_eval(flags[1]),
        "-arch=sm_90a",
        "-Xptxas=-v",
        "-cubin",
        "-o",
        target,
        source,
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, stored, loaded = (
        [int(count) for count in re.findall(pattern, text)]
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    )
    assert len(registers) == len(stored) == len(loaded) > 0
    assert max(registers) <= MARGIN * LIMITS[name][0]
    assert max(*stored, *loaded) <= LIMITS[name][1]


def test_every_file_with_kernels_has_a_limit() -> None:
    files = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu") if "__global__" in path.read_text()}
    assert files <= LIMITS.keys()
