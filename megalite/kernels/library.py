"""Load the compiled kernel libraries, and choose implementations for operators that they do not contain.

Without the CUDA library, which nvcc builds, a GPU runs the references through torch.compile. Operators with a
random key have Triton kernels instead, because torch.compile would recompile for each key. Both are compiled
on first use, by Triton, which CUDA builds of torch include and which needs a C compiler. If this fails, the
references run eagerly.
"""

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megalite.utils.errors import UserError, first_line
from megalite.utils.log import log
from megalite.utils.torch_private import has_kernel

NAMESPACE = "megalite"

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_LIBRARY = "megalite.kernels._C"
_CUDA_LIBRARY = "megalite.kernels._CUDA"
_CAPABILITY = "MEGALITE_CPU_CAPABILITY"
_CAPABILITIES = ("default", "avx2", "avx512")


def _load(library: str, needed: str) -> str:
    """Register the kernels of a library with torch; return the reason if it does not load, otherwise ""."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError:
        return f"not compiled when megalite was built: install it again, beside torch and with {needed}"
    except ImportError as error:  # built for another torch, another machine
        return f"compiled library does not load: {str(error).splitlines()[0]}"
    return ""


def _load_cpu() -> str:
    requested = os.environ.get(_CAPABILITY)
    if requested is not None and requested not in _CAPABILITIES:
        raise UserError(
            f"{_CAPABILITY}={requested} is none of {', '.join(_CAPABILITIES)}: unset it, or name one"
        )
    problem = _load(_LIBRARY, "a C++ compiler")
    if problem or hasattr(sys.modules[_LIBRARY], "capability"):
        return problem
    return "compiled library is an older megalite's: build it again"


LOAD_ERROR = _load_cpu()
CUDA_LOAD_ERROR = "torch has no CUDA" if torch.version.cuda is None else _load(_CUDA_LIBRARY, "nvcc")


_AT_RUN_TIME: dict[str, str] = {}
"""The run-time compiler of each operator's CUDA kernels, "torch.compile" or "Triton", by operator name."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def define(
    name: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    compiled: Callable[..., Any] | None = None,
    triton: Callable[..., Any] | None = None,
) -> None:
    """Define an operator of megalite.

    Args:
        schema: arguments and results.
        reference: the plain PyTorch implementation, for devices for which no library has a compiled kernel.
        fake: returns results without values.
        save, backward: autograd's `setup_context` and backward; None without autograd.
        compiled, triton: see `at_run_time`; for CUDA without the library.
    """
    op = f"{NAMESPACE}::{name}"
    torch.library.define(op, schema)
    torch.library.impl(op, "default", reference)
    torch.library.register_fake(op, fake)
    if backward is not None:
        torch.library.register_autograd(op, backward, setup_context=save)
    at_run_time_by = "Triton" if triton is not None else "torch.compile" if compiled is not None else ""
    if at_run_time_by and torch.version.cuda is not None and not is_compiled(name, "cuda"):
        _AT_RUN_TIME[name] = at_run_time_by
        torch.library.impl(op, "CUDA", at_run_time(reference, compiled=compiled, triton=triton))


def like_first(x: Tensor, *_: object) -> Tensor:
    """Return a tensor without values in the shape of an operator's first argument."""
    return x.new_empty(x.shape)


def no_result(*_: object) -> None:
    """Do nothing: an operator in place changes no values of meta tensors."""


def at_run_time(
    reference: Callable[_P, _R],
    *,
    compiled: Callable[_P, _R] | None = None,
    triton: Callable[..., _R] | None = None,
    device_type: str = "cuda",
) -> Callable[_P, _R]:
    """Return a function whose kernels are compiled when it first runs on a GPU.

    It calls the reference on other devices, in a graph of torch.compile, and if compilation does not work.

    Args:
        compiled: the function for torch.compile, if it is not the reference. An eager reference may work in
            pieces to bound its temporaries; a compiled function has no temporaries.
        triton: a function that launches Triton kernels; torch.compile is then not used.
        device_type: type of the device for which kernels are compiled.
    """
    compile_once = functools.cache(lambda: _compiled(compiled or reference))

    @functools.wraps(reference)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _R:
        on_device = isinstance(arguments[0], Tensor) and arguments[0].device.type == device_type
        if torch.compiler.is_compiling() or not on_device or compile_problem(device_type):
            return reference(*arguments, **options)
        if triton is not None:
            return triton(*arguments, **options)
        # The operator has its own backward. Without autograd, the same graph serves tensors with and without
        # a gradient.
        detached = (each.detach() if isinstance(each, Tensor) else each for each in arguments)
        with torch.no_grad():
            result: _R = compile_once()(*detached, **options)
        return result

    return run


def one_operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function be one operator on meta tensors, as on a GPU one kernel computes it.

    What reads the operators of a planned run or a dry run then sees neither its steps nor their temporaries.

    Args:
        schema: arguments and results; the operator has the function's name.
        fake: returns results without values.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__name__
        define(name, schema, function, fake)
        on_paper = getattr(getattr(torch.ops, NAMESPACE), name)

        @functools.wraps(function)
        def run(*arguments: _P.args, **options: _P.kwargs) -> _R:
            is_meta = isinstance(arguments[0], Tensor) and arguments[0].is_meta
            result: _R = (on_paper if is_meta else function)(*arguments, **options)
            return result

        return run

    return decorate


def tag_compile_caches() -> None:
    """Make torch.compile's caches on disk depend on megalite's code.

    Their keys name the operators of a graph, but not the shapes that an operator's fake returns: after an
    update of megalite, a graph compiled before it would be loaded and fail.
    """
    from torch.compiler import config  # takes seconds to import

    if _code_tag() not in config.cache_key_tag:
        config.cache_key_tag += _code_tag()


@functools.cache
def _code_tag() -> str:
    """Return "megalite-" and a digest of the package's Python files."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return f"megalite-{digest.hexdigest()}"


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with torch.compile; the first call takes seconds.

    Autotuning is off: it chooses the fastest summation order by measurement, and ranks could choose
    differently.
    """
    return torch.compile(function, options={"deterministic": True})


@functools.cache
def compile_problem(device_type: str) -> str:
    """Compile a small graph once, and return the reason if torch.compile does not work on a device, or ""."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "no GPU is visible"
    try:
        _compiled(_tried)(torch.zeros(8, device=device_type))
    except (RuntimeError, ImportError, OSError) as error:  # torch.compile's own errors are RuntimeErrors
        return str(error).strip().splitlines()[0]
    return ""


def _tried(x: Tensor) -> Tensor:
    return x.sin() + 1.0


def passes_trial(difference: Callable[[], str], otherwise: str) -> bool:
    """Return whether an operator agrees with its reference; log a warning if it does not.

    Args:
        difference: runs the operator, and returns a description of the difference, or an empty string.
        otherwise: names the implementation that runs instead, for the warning.
    """
    try:
        problem = difference()
    except RuntimeError as error:
        problem = first_line(error)
    if problem:
        log.warning(f"{otherwise}: {problem}")
    return not problem


def is_compiled(op: str, device_type: str) -> bool:
    """Return whether a library has a compiled kernel of `op` for `device_type`."""
    key = _DISPATCH_KEYS.get(device_type)
    return (
        key is not None
        and not (device_type == "cuda" and op in _AT_RUN_TIME)
        and has_kernel(f"{NAMESPACE}::{op}", key)
    )


def is_eager(op: str, device_type: str) -> bool:
    """Return whether plain PyTorch runs `op` on `device_type`, operation by operation."""
    return implementation(op, device_type).startswith("eager")


def implementation(op: str, device_type: str) -> str:
    """Return the implementation of `op` on `device_type`, and the reason if it is not a compiled library.

    It is `compiled` with the processor's instruction set, `torch.compile`, `Triton` or `eager`.
    """
    is_cpu = device_type == "cpu"
    if is_compiled(op, device_type):
        return f"compiled ({LOAD_ERROR or sys.modules[_LIBRARY].capability()})" if is_cpu else "compiled"
    if device_type not in _DISPATCH_KEYS:
        return f"eager (no compiled kernel for {device_type})"
    problem = LOAD_ERROR if is_cpu else CUDA_LOAD_ERROR
    reason = problem or "the compiled library lacks it: build megalite again"
    if is_cpu or op not in _AT_RUN_TIME:
        return f"eager ({reason})"
    if problem := compile_problem(device_type):
        return f"eager ({reason}; torch.compile does not work: {problem})"
    return f"{_AT_RUN_TIME[op]} ({reason})"


_OLDEST_PTXAS = (12, 9)
_PTXAS_PATH = "TRITON_PTXAS_PATH"
_HOPPER = (9, 0)


def ensure_ptxas(device: torch.device) -> str:
    """Let Triton use a ptxas that is correct for this GPU; return why there is none, or an empty string.

    ptxas, Triton's assembler, compiles some kernels for Hopper wrongly in CUDA 12.8, which Triton 3.6
    includes: the code computes the address of a tensor core's operand from a register that no instruction
    has written. On an H200, recurrences had wrong results or an illegal memory access. ptxas of CUDA 12.9 and
    13.0 compiles the same PTX correctly. The machine code of the attention kernels has no such register.

    If Triton's own is not correct, this sets Triton's environment variable TRITON_PTXAS_PATH to the ptxas of
    torch, as torch.compile does in its processes.
    """
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return ""
    if _is_correct_ptxas(version := _ptxas_version()):
        return ""
    own = Path(torch.__file__).parent / "bin" / "ptxas"
    if _PTXAS_PATH not in os.environ and own.exists():
        os.environ[_PTXAS_PATH] = str(own)
        if _is_correct_ptxas(_ptxas_version()):
            return ""
        del os.environ[_PTXAS_PATH]
    needed = f"set {_PTXAS_PATH} to a ptxas of CUDA 12.9 or later"
    return f"ptxas {version} compiles the kernels wrongly for this GPU: {needed}"


def _ptxas_version() -> str:
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    version: str = compiler.get_ptxas(10 * _HOPPER[0] + _HOPPER[1]).version
    return version


def _is_correct_ptxas(version: str) -> bool:
    return tuple(map(int, version.split("."))) >= _OLDEST_PTXAS
