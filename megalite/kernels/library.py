"""The compiled library of kernels: loads it if it is there, and says what serves where it is not."""

import importlib
import os
import sys

import torch

from megalite.errors import UserError

NAMESPACE = "megalite"

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_LIBRARY = "megalite.kernels._C"
_CAPABILITY = "MEGALITE_CPU_CAPABILITY"
_CAPABILITIES = ("default", "avx2", "avx512")


def _load() -> str:
    """Registers the compiled kernels with torch; returns why it could not, or an empty string."""
    asked = os.environ.get(_CAPABILITY)
    if asked is not None and asked not in _CAPABILITIES:
        raise UserError(f"{_CAPABILITY}={asked} is none of {', '.join(_CAPABILITIES)}: unset it, or name one")
    try:
        library = importlib.import_module(_LIBRARY)
    except ModuleNotFoundError:
        return "not compiled when megalite was built: pip install --no-build-isolation . with a C++ compiler"
    except ImportError as error:  # built for another torch, another machine
        return f"compiled library does not load: {str(error).splitlines()[0]}"
    return "" if hasattr(library, "capability") else "compiled library is an older megalite's: build it again"


LOAD_ERROR = _load()


def implementation(op: str, device_type: str) -> str:
    """What serves `op` on `device_type`: `compiled` and for what, or `reference` and why."""
    key = _DISPATCH_KEYS.get(device_type)
    is_cpu = device_type == "cpu"
    if key and torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key):
        return f"compiled ({LOAD_ERROR or sys.modules[_LIBRARY].capability()})" if is_cpu else "compiled"
    if is_cpu:
        return f"reference ({LOAD_ERROR or 'the compiled library lacks it: build megalite again'})"
    return f"reference (no compiled kernel for {device_type})"
