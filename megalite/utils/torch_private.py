"""All private names of torch that megalite uses. A new version of torch may change them without notice.

No public name of torch from 2.11 to 2.15 does the same. No other module imports or calls a private name of
torch. ``tests/unit/utils/test_torch_private.py`` checks that and runs each entry; it passed with all versions
in `megalite.utils.torch_versions.TESTED`. Modules that take seconds to import are imported where they are
used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._autograd import _get_sequence_nr
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.graph import Node

# The public torch.overrides.TorchFunctionMode does not see the operators of backward passes.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Functions on nested lists, tuples and dicts have no public module.
from torch.utils._pytree import tree_leaves as tree_leaves

# Operators on lists of tensors. The public classes of torch.optim only use them within their own steps.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_

# The public torch.nn.functional.scaled_mm has no CPU kernel in torch 2.11.
scaled_mm = torch._scaled_mm
scaled_mm_operator = torch.ops.aten._scaled_mm

# The operator of the public torch.nn.functional.grouped_mm, as a dispatch mode sees it.
grouped_mm = torch.ops.aten._grouped_mm

# If an autograd Function returns the result of a public view, it must not be changed in place.
unsafe_view = torch.ops.aten._unsafe_view

# Dispatch modes see these operators, not the public scaled_dot_product_attention and Tensor.item.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
unfused_attention = torch.ops.aten._scaled_dot_product_attention_math
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
read_scalar = torch.ops.aten._local_scalar_dense.default


def selected_attention(*arguments: Any, **options: Any) -> int:
    """Return the number of the SDPBackend that `scaled_dot_product_attention` selects for these arguments.

    The public `torch.backends.cuda.can_use_flash_attention` and the like only tell what could be selected.
    """
    return torch._fused_sdp_choice(*arguments, **options)


@contextmanager
def backward_within(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Let each backward pass run within a mode, with its hooks and the backward functions of Python.

    A `TorchFunctionMode` is off while it handles a call, and `Tensor.backward` is such a call.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_within(*arguments: Any, **options: Any) -> Any:
        with mode:
            return run(*arguments, **options)

    autograd._engine_run_backward = run_within
    try:
        yield
    finally:
        autograd._engine_run_backward = run


def schema_of(operator: Any) -> Any:
    """Return an operator's name, arguments and results; `torch.library` only defines schemas."""
    return operator._schema


def has_kernel(operator: str, key: str) -> bool:
    """Return whether a kernel is registered under this dispatch key itself.

    `torch.library.get_kernel` also finds the kernel that the dispatcher falls back to.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def scoped_library(namespace: str, kind: str) -> AbstractContextManager[torch.library.Library]:
    """Open a `torch.library.Library`, and undo its registrations when the block ends."""
    return torch.library._scoped_library(namespace, kind)


class EagerMode(TorchDispatchMode):
    """Dispatch mode without torch's wrapper that disables torch.compile.

    A dry run compiles nothing. The wrapper would take half of the time under a mode, and seconds to import.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def without_cpp_warnings() -> Iterator[None]:
    """Let torch's C++ code print errors only, in this block.

    The public TORCH_CPP_LOG_LEVEL is read once, when torch is imported. Operators warn through Python, and
    still do.
    """
    level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    before, level.value = level.value, max(level.value, 2)  # INFO, WARNING, ERROR, FATAL
    try:
        yield
    finally:
        level.value = before


def storage_number(storage: torch.UntypedStorage) -> int:
    """Return a number that is unique to this storage while it exists. `data_ptr` is 0 for meta tensors."""
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    """Return a number that changes with each write to the tensor's memory in place."""
    return tensor._version


def next_node_number() -> int:
    """Return a number above all autograd nodes created so far, and not above any created later.

    Hooks on nodes are public, but which module created a node is not. It follows from these numbers.
    """
    return _get_sequence_nr()


def node_number(node: Node) -> int:
    """Return the number of a node in autograd's graph. Nodes are numbered in the order of their creation."""
    return node._sequence_nr()


def profiler_options(*, verbose: bool) -> Any:
    """Return `experimental_config` of `torch.profiler.profile`, whose documentation names this class."""
    return _ExperimentalConfig(verbose=verbose)


def start_memory_history() -> None:
    """Record each allocation of GPU memory from now on, with its call stack.

    torch's documentation of its memory viewer names this function and the next two.
    """
    torch.cuda.memory._record_memory_history()


def stop_memory_history() -> None:
    """Stop recording, and discard the record."""
    torch.cuda.memory._record_memory_history(enabled=None)


def save_memory_history(path: str) -> None:
    """Write the record for viewers. The public `memory_snapshot` only returns allocated memory."""
    torch.cuda.memory._dump_snapshot(path)


COMPILER = "torch._dynamo"
"""Module that torch imports for the first function that is not to be compiled; it takes about a second."""


@contextmanager
def compilations_observed(begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    """Call the functions when torch.compile begins and ends a compilation in this block.

    The public `torch.compiler` has no such hook.
    """
    from torch._dynamo.callback import callback_handler  # takes a second to import

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def forget_compiled_code() -> None:
    """Free what torch.compile has compiled, and count recompilations anew.

    The public `torch.compiler.reset` would also remove the functions of `compilations_observed`.
    """
    import torch._dynamo  # takes a second to import

    torch._dynamo.reset_code_caches()


def fake_backend_devices() -> list[str]:
    """Return the list of device types on which the backend "fake" runs; a caller may add to it.

    torch registers the backend, with a new list, when the first group of it is created.
    """
    import_module("torch.testing._internal.distributed.fake_pg")  # registers it now
    return dist.Backend.backend_capability["fake"]


def abort_process_groups() -> None:
    """End all collectives in flight on a GPU, and all process groups of a process that has a GPU.

    The public `torch.distributed.destroy_process_group` waits for ranks that are gone.
    """
    if torch.cuda.is_available() and dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def fake_group(name: str, size: int) -> dist.ProcessGroup:
    """Return a group of `size` ranks whose collectives do nothing, without starting torch.distributed.

    Public functions only make groups of a started process group, and there is one in a process at a time.
    """
    fake = import_module("torch.testing._internal.distributed.fake_pg")
    backend_class = _distributed_c10d.FakeProcessGroup
    make = getattr(backend_class, "_create_internal", backend_class)
    group = dist.ProcessGroup(fake.FakeStore(), 0, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    backend = make(0, size, backend_class.Options())  # type: ignore[call-arg]
    group._register_backend(torch.device("meta"), kind, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return the number of collectives and messages that this rank has started in the group."""
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]


def flight_recorder(device_type: str) -> Callable[..., bytes] | None:
    """Return the function that pickles NCCL's or gloo's last collectives; None if this torch has none.

    Only the settings that make torch's own NCCL watchdog write them are public.
    """
    name = {"cuda": "_dump_nccl_trace", "cpu": "_dump_fr_trace"}.get(device_type, "")
    return getattr(_distributed_c10d, name, None)


# Symmetric memory. Its operators have kernels for CUDA and for the meta device. Groups need no registration:
# torch 2.11 has deprecated `enable_symm_mem_for_group`.


def all_gather_gemm(
    x: Tensor, matrix: Tensor, group: dist.ProcessGroup, *, keeps_gathered: bool = False
) -> tuple[Tensor | None, Tensor]:
    """All-gather over the first dim while multiplying: ``[s/n, b, k]``, ``[k, m]`` -> ``[s, b, m]``.

    Args:
        x: contiguous.

    Returns:
        The gathered `x` if `keeps_gathered`, else None or `x`; and the product.
    """
    import torch.distributed._symmetric_memory  # defines the operators; takes a second to import

    gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x, [matrix], 0, group.group_name, return_A=keeps_gathered
    )
    return gathered, unsafe_view(y, y.shape)  # y may be a view


def gemm_reduce_scatter(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Multiply while summing over the ranks and scattering the first dim: ``[s, b, k]`` -> ``[s/n, b, m]``.

    Args:
        x: contiguous; its first dim is divisible by the size of the group.
    """
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group.group_name)


def disable_context_parallelism() -> None:
    """Let attention of DTensors no longer be cut over positions, which a program may have enabled for all."""
    from torch.distributed.tensor.experimental import _attention

    _attention._disable_context_parallel_dispatcher()
