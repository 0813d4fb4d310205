"""Build the C++ libraries of the package; pyproject.toml has all other metadata.

There are four libraries. `megalite.data._index_builder` and `megalite.data._json_reader` use pybind11 and are
required for training and for reading a corpus. `megalite.kernels._C` and, if torch has CUDA,
`megalite.kernels._CUDA` use torch's stable ABI. If they cannot be built, plain PyTorch replaces them.
"""

import importlib.metadata
import importlib.util
import logging
import runpy
import site
import subprocess
import sys
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True))

# The oldest torch that the library runs on, even if it is built with a newer torch.
TORCH_TARGET_VERSION = "0x020B000000000000"

# Random numbers are bitwise equal on all machines only if a * b + c is rounded twice. The other two flags let
# loops with square roots and comparisons vectorise, and do not change results.
EXACT_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def index_builder() -> Extension:
    """Return the extension that builds sample indices."""
    return Pybind11Extension(
        "megalite.data._index_builder",
        ["csrc/index_builder.cpp"],
        cxx_std=17,
        extra_compile_args=["-O3", *EXACT_FLAGS],
    )


def json_reader() -> Extension:
    """Return the extension that reads the lines of corpora."""
    return Pybind11Extension(
        "megalite.data._json_reader",
        ["csrc/json_reader.cpp"],
        cxx_std=17,
        extra_compile_args=["-O3"],
    )


def kernels() -> list[Extension]:
    """Return the extensions with compiled kernels, if this environment has a torch: they need its headers."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        logging.warning(
            "megalite.kernels._C is not built, as this environment has no torch: plain PyTorch replaces it. "
            "To build it: install torch first."
        )
        return []
    root = Path(torch.submodule_search_locations[0])
    cpu = stable_library("_C", ["csrc/library.cpp", *sorted(glob("csrc/cpu/*.cpp"))], root)
    version = runpy.run_path(str(root / "version.py"))["cuda"]
    if version is None:
        return [cpu]
    try:
        toolkit = runpy.run_path("scripts/cuda_toolkit.py")["find_toolkit"](version)
    except LookupError as problem:
        logging.warning(
            f"megalite.kernels._CUDA is not built, as {problem}: torch.compile and Triton replace it. "
            "To build it: set CUDA_HOME to such a toolkit, and install megalite again."
        )
        return [cpu]
    cuda = stable_library("_CUDA", sorted(glob("csrc/cuda/*.cpp") + glob("csrc/cuda/*.cu")), root)
    cuda.nvcc = [
        toolkit.nvcc,
        *NVCC_FLAGS,
        *gpu_targets(toolkit.nvcc),
        *(f"-I{folder}" for folder in toolkit.include_dirs),
    ]
    # CUDA's runtime is linked statically, so any torch with a new enough driver works.
    cuda.libraries += ["torch_cuda", "cudart_static", "dl", "rt", "pthread"]
    cuda.library_dirs += toolkit.library_dirs
    return [cpu, cuda]


def stable_library(name: str, sources: list[str], torch: Path) -> Extension:
    """Return the extension for a library of kernels on torch's stable ABI."""
    return Extension(
        f"megalite.kernels.{name}",
        sources,
        include_dirs=[str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],  # importing torch has already loaded it, so no path to it is recorded
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), ("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fopenmp-simd", *EXACT_FLAGS],
        py_limited_api=True,
        optional=True,
        language="c++",
    )


def gpu_targets(compiler: str) -> list[str]:
    """Return flags for those target GPUs that the compiler knows, and for all later GPUs."""
    told = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    known = [code for code in ("90", "100") if f"sm_{code}" in told]
    return [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        *(f"-gencode=arch=compute_{code}a,code=sm_{code}a" for code in known),
    ]


def is_stale(object_file: str, source: str) -> bool:
    """Return whether a source must be compiled again, because it, a header or this file changed."""
    built = Path(object_file)
    needed = [Path(source), *map(Path, HEADERS), Path("setup.py")]
    return not built.exists() or any(path.stat().st_mtime > built.stat().st_mtime for path in needed)


class BuildExt(build_ext):
    """Compiles only changed sources, even in an editable install, and copies the libraries to `megalite/`.

    Python prefers `megalite/` in the current folder to the installed package. So `pip install .` must make
    both usable: users start `torchrun -m megalite` or `pretrain_gpt.py` in the folder that they installed
    from.
    """

    def finalize_options(self) -> None:
        """Give an editable install a fixed build folder for each Python."""
        super().finalize_options()
        if self.editable_mode:
            folder = Path("build") / f"editable-{sys.implementation.cache_tag}"
            self.build_temp, self.build_lib = str(folder / "temp"), str(folder / "lib")

    def run(self) -> None:
        """Build the libraries, and copy them into the source folder as an editable install does."""
        super().run()
        if not self.inplace:
            self.copy_extensions_to_source()

    def build_extensions(self) -> None:
        """Compile `.cu` files with nvcc, and all others with the C++ compiler."""
        compile_cpp = self.compiler._compile

        def compile_any(target, source, extension, *arguments):
            if extension != ".cu":
                return compile_cpp(target, source, extension, *arguments)
            nvcc = next(each.nvcc for each in self.extensions if hasattr(each, "nvcc"))
            self.spawn([*nvcc, "-c", source, "-o", target])

        self.compiler.src_extensions.append(".cu")
        self.compiler._compile = compile_any
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Build a library. If that fails, do not leave an older one behind."""
        ext.depends = [*HEADERS, "setup.py"]
        try:
            super().build_extension(ext)
        except Exception:
            for folder in (Path(self.build_lib), Path()):
                (folder / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
            raise


# A build without isolation does not check the build requirements in pyproject.toml.
if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
    raise SystemExit("megalite needs setuptools 77.0.3 or newer to build: pip install --upgrade setuptools")

# pip runs an isolated build with the target Python, but hides that Python's packages. The kernels need torch
# from there, and nvcc if it is a package. Add them last, after the build's own packages.
own_path = list(sys.path)
sys.path += [folder for folder in site.getsitepackages() if folder not in own_path]
compiled_kernels = kernels()
sys.path[:] = own_path

ParallelCompile("MAX_JOBS", needs_recompile=is_stale).install()
setup(ext_modules=[index_builder(), json_reader(), *compiled_kernels], cmdclass={"build_ext": BuildExt})
