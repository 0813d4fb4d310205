"""Choose a correct ptxas, the assembler of Triton's kernels.

ptxas of CUDA 12.8, which Triton 3.6 includes, compiles some kernels for Hopper wrongly. The code computes the
address of a tensor core's operand from a register that no instruction has written. On an H200, recurrences
had wrong results or an illegal memory access. ptxas of CUDA 12.9 and 13.0 compiles the same PTX correctly.
The machine code of the attention kernels has no such register.
"""

import os
from importlib import import_module
from pathlib import Path

import torch

_OLDEST = (12, 9)
_VARIABLE = "TRITON_PTXAS_PATH"
_HOPPER = (9, 0)


def ensure_ptxas(device: torch.device) -> str:
    """Let Triton use a ptxas that is correct for this GPU; return why there is none, or an empty string.

    If Triton's own is not correct, this sets Triton's environment variable TRITON_PTXAS_PATH to the ptxas of
    torch, as torch.compile does in its processes.
    """
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return ""
    if _is_correct(version := _version()):
        return ""
    own = Path(torch.__file__).parent / "bin" / "ptxas"
    if _VARIABLE not in os.environ and own.exists():
        os.environ[_VARIABLE] = str(own)
        if _is_correct(_version()):
            return ""
        del os.environ[_VARIABLE]
    needed = f"set {_VARIABLE} to a ptxas of CUDA 12.9 or later"
    return f"ptxas {version} compiles the kernels wrongly for this GPU: {needed}"


def _version() -> str:
    """Return the version of the ptxas that Triton uses for Hopper, such as "12.8"."""
    compiler = import_module("triton.backends.nvidia.compiler")
    version: str = compiler.get_ptxas(10 * _HOPPER[0] + _HOPPER[1]).version
    return version


def _is_correct(version: str) -> bool:
    return tuple(map(int, version.split("."))) >= _OLDEST
