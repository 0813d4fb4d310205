"""What CUDA and NCCL refuse, and the fake device and backend would accept.

The errors of memory are those of PyTorch's CUDA code, and the errors of collectives those of ProcessGroupNCCL
(`check_gpu_single_tensor`, `getNcclDataType` and the checks of each collective), but for two that NCCL
leaves to the caller: messages from memory that is not contiguous, and messages without elements.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.observe.recorder import tensors_in

OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location"
)
NCCL_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
MESSAGES = ("send", "recv_")
REDUCTIONS = ("allreduce_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_")
NO_TENSORS_MOVE = ("barrier", "monitored_barrier_")


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements share memory, as in an expanded tensor."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def refuse_pinning(memory: Tensor, *, is_on_device: bool) -> None:
    """Raise the error of a tensor that cannot be pinned."""
    if is_on_device:
        raise RuntimeError("cannot pin memory of the device: only dense CPU tensors can be pinned")
    if overlaps(memory):  # the pinned copy has its strides
        raise RuntimeError(OVERLAP)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info and each.alias_info.is_write)


def refuse_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise the error of an operator that writes a tensor whose elements share memory."""
    for position, name in _written(func):
        written = args[position] if position < len(args) else kwargs.get(name)
        if any(map(overlaps, tensors_in(written))):
            raise RuntimeError(OVERLAP)


def refuse_collective(name: str, args: Sequence[Any], is_on_device: Sequence[bool]) -> None:
    """Raise the error of a collective, or of a message, that a group of GPUs refuses.

    Args:
        name: name of the operator of c10d.
        is_on_device: for each tensor of the arguments, whether it is on the device. Those on the host are
            gloo's, which takes more.
    """
    tensors = tensors_in(args)
    if not any(is_on_device) or name in NO_TENSORS_MOVE:
        return
    if not all(is_on_device):
        raise RuntimeError(f"{name}: tensors must be CUDA and dense, and some are on the host")
    for tensor in tensors:
        if not tensor.is_contiguous():
            shape = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
            raise RuntimeError(f"{name}: tensors must be contiguous, not {shape}")
        if tensor.dtype not in NCCL_DTYPES:
            raise RuntimeError(f"{name}: NCCL has no type for {tensor.dtype}")
        if name in REDUCTIONS and tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
            raise RuntimeError(f"{name}: NCCL does not reduce {tensor.dtype}")
        if name in MESSAGES and tensor.numel() == 0:
            raise RuntimeError(f"{name}: a message without elements")
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        size = next(
            dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject)
        ).size()
        whole, part = tensors if name == "_allgather_base_" else reversed(tensors)
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            shapes = f"{part.dtype} {list(part.shape)} and {whole.dtype} {list(whole.shape)}"
            raise RuntimeError(f"{name}: a tensor must be the world size, {size}, times the other: {shapes}")
    if name == "alltoall_base_":
        sizes = [each for each in args if isinstance(each, list) and all(isinstance(n, int) for n in each)]
        for tensor, split in zip(tensors, sizes, strict=True):
            if split and sum(split) != tensor.shape[0]:
                raise RuntimeError(f"{name}: splits {split} do not sum to {tensor.shape[0]}, the first size")
