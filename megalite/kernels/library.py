"""The compiled library of kernels: loads it if it is there, and says what serves where it is not."""

import importlib

import torch

NAMESPACE = "megalite"

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def _load() -> str:
    """Registers the compiled kernels with torch; returns why it could not, or an empty string."""
    try:
        importlib.import_module("megalite.kernels._C")
    except ModuleNotFoundError:
        return "not compiled when megalite was built: pip install --no-build-isolation . with a C++ compiler"
    except ImportError as error:  # built for another torch, another machine
        return f"compiled library does not load: {str(error).splitlines()[0]}"
    return ""


LOAD_ERROR = _load()


def implementation(op: str, device_type: str) -> str:
    """Names what serves `op` on `device_type`: `compiled`, or `reference` with the reason in brackets."""
    key = _DISPATCH_KEYS.get(device_type)
    if key and torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key):
        return "compiled"
    reason = LOAD_ERROR if device_type == "cpu" else f"no compiled kernel for {device_type}"
    return f"reference ({reason})"
