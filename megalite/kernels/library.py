"""Load the compiled libraries of kernels, and say what is used if one is missing."""

import importlib
import os
import sys

import torch

from megalite.errors import UserError

NAMESPACE = "megalite"

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_LIBRARY = "megalite.kernels._C"
_CUDA_LIBRARY = "megalite.kernels._CUDA"
_CAPABILITY = "MEGALITE_CPU_CAPABILITY"
_CAPABILITIES = ("default", "avx2", "avx512")


def _load(library: str, needed: str) -> str:
    """Register the kernels of a library with torch; return why it could not be loaded, or an empty string."""
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


def is_compiled(op: str, device_type: str) -> bool:
    """Return whether `op` has a compiled kernel on `device_type`."""
    key = _DISPATCH_KEYS.get(device_type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key)


def implementation(op: str, device_type: str) -> str:
    """Return what runs `op` on `device_type`: `compiled` and for what, or `reference` and why."""
    is_cpu = device_type == "cpu"
    if is_compiled(op, device_type):
        return f"compiled ({LOAD_ERROR or sys.modules[_LIBRARY].capability()})" if is_cpu else "compiled"
    if device_type not in _DISPATCH_KEYS:
        return f"reference (no compiled kernel for {device_type})"
    problem = LOAD_ERROR if is_cpu else CUDA_LOAD_ERROR
    return f"reference ({problem or 'the compiled library lacks it: build megalite again'})"
