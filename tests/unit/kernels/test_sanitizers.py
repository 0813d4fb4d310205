"""The kernels' tests, run on a build with AddressSanitizer and UndefinedBehaviorSanitizer."""

import shutil
from pathlib import Path

import pytest

from tests.unit.kernels.posing import ROOT, SANITIZERS, build, run_sanitized_tests


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path) -> None:
    sources = [ROOT / "csrc" / "library.cpp", *sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))]
    run_sanitized_tests(build(tmp_path / "_C.so", sources, ["-g", "-fopenmp-simd", *SANITIZERS]))
