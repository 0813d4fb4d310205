"""The CUDA library as setup.py builds it where torch has CUDA: with nvcc, but a torch that only says so.

It loads beside the real torch and registers its operators. The only symbol that a torch without CUDA lacks is
given by a library made here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.kernels.posing import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA: it is what installs build"),
]

REAL = Path(torch.__file__).parent
LOADED = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import torch
import megalite.kernels
torch.ops.load_library(sys.argv[2])
print(megalite.kernels.describe("cuda"))
try:
    torch.ops.megalite.rms_norm(torch.empty(2, 4, device="cuda"), torch.empty(4, device="cuda"), 1e-5)
except (AssertionError, RuntimeError) as error:
    print(error)
"""


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a torch whose version has CUDA, of the real one's headers and libraries."""
    site = tmp_path_factory.mktemp("site")
    package = site / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text('cuda = "13.0"\n')
    (package / "include").symlink_to(REAL / "include")
    for library in (REAL / "lib").glob("*.so*"):
        (package / "lib" / library.name).symlink_to(library)
    source = site / "stream.c"
    source.write_text(
        "int aoti_torch_get_current_cuda_stream(int device, void** stream) { *stream = 0; return 0; }"
    )
    cuda = package / "lib" / "libtorch_cuda.so"
    soname = f"-Wl,-soname,{cuda.name}"  # by which the loader knows what is loaded already
    subprocess.run(["gcc", "-shared", "-fPIC", soname, "-o", cuda, source], check=True)
    return site


BUILD = ("build_ext", "--build-lib", "built", "--build-temp", "temp")


def run_setup(
    site: Path, checkout: Path, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Of a copy of the sources, with the torch of a site."""
    shutil.copytree(ROOT / "csrc", checkout / "csrc")
    shutil.copytree(ROOT / "megalite", checkout / "megalite", ignore=shutil.ignore_patterns("*.so"))
    (checkout / "scripts").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "scripts/cuda_toolkit.py"):
        shutil.copy(ROOT / name, checkout / name)
    return subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(site)} | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def library(pretended: Path) -> Path:
    """`_CUDA`, built from a copy of the sources with nvcc's warnings as errors."""
    checkout = pretended / "checkout"
    done = run_setup(pretended, checkout, *BUILD, NVCC_APPEND_FLAGS="-Werror all-warnings")
    built = checkout / "built" / "megalite" / "kernels" / "_CUDA.abi3.so"
    assert done.returncode == 0 and built.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return built


def test_it_loads_and_registers_every_operator(pretended: Path, library: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(pretended / "torch" / "lib" / "libtorch_cuda.so"), str(library)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    operators, refused = done.stdout.splitlines()
    assert operators.endswith(": compiled") and "eager" not in operators
    assert "CUDA" in refused  # torch's own: it has no such device


def test_a_toolkit_that_the_driver_may_not_run_is_left_out(pretended: Path, tmp_path: Path) -> None:
    """CUDA 13's own runtime does not start on a driver of CUDA 12, on which a torch of CUDA 12 does."""
    site = tmp_path / "site"
    shutil.copytree(pretended / "torch", site / "torch", symlinks=True)
    (site / "torch" / "version.py").write_text('cuda = "11.8"\n')
    done = run_setup(site, tmp_path / "checkout", "--name")
    assert done.returncode == 0
    assert "_CUDA is not built, as nvcc has CUDA" in done.stderr and "torch has CUDA 11" in done.stderr
