"""Operators of our own, one file each: schema, fake implementation, autograd, plain PyTorch reference."""

from megalite.kernels.dropout import dropout
from megalite.kernels.library import implementation
from megalite.kernels.normal import fill_normal_
from megalite.kernels.philox import site_key

__all__ = ["describe", "dropout", "fill_normal_", "site_key"]

_OPS = ("dropout", "fill_normal_")


def describe(device_type: str = "cpu") -> str:
    """One line for the log that names what each operator runs on."""
    names: dict[str, list[str]] = {}
    for op in _OPS:
        names.setdefault(implementation(op, device_type), []).append(op)
    return "; ".join(f"{', '.join(ops)}: {serving}" for serving, ops in names.items())
