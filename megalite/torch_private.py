"""All private names of torch that megalite uses. A new version of torch may change them without notice.

No public name of torch from 2.11 to 2.15 does the same. No other module imports or calls a private name of
torch. ``tests/unit/test_torch_private.py`` checks that and runs each entry; it passed with every version in
`megalite.torch_versions.TESTED`. Modules that take seconds to import are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._autograd import _get_sequence_nr
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh

# The public torch.overrides.TorchFunctionMode does not see the operators of backward passes.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Functions on nested lists, tuples and dicts have no public module.
from torch.utils._pytree import tree_leaves as tree_leaves

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Operators on lists of tensors. The public classes of torch.optim only use them within their own steps.
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_

# The public torch.nn.functional.scaled_mm has no CPU kernel in torch 2.11.
scaled_mm = torch._scaled_mm

# If an autograd Function returns the result of a public view, it must not be changed in place.
unsafe_view = torch.ops.aten._unsafe_view

# Dispatch modes see these operators, not the public scaled_dot_product_attention and Tensor.item.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
unfused_attention = torch.ops.aten._scaled_dot_product_attention_math
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
read_scalar = torch.ops.aten._local_scalar_dense.default


def selected_attention(*arguments: Any, **options: Any) -> int:
    """Return the number of the SDPBackend that `scaled_dot_product_attention` selects for these arguments.

    The public `torch.backends.cuda.can_use_flash_attention` and the like only tell what could be selected.
    """
    return torch._fused_sdp_choice(*arguments, **options)


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
    """A dispatch mode without torch's wrapper that disables torch.compile.

    A dry run compiles nothing. The wrapper would take half of the time under a mode, and seconds to import.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def storage_number(storage: torch.UntypedStorage) -> int:
    """Return a number that is unique to this storage while it exists. `data_ptr` is 0 for meta tensors."""
    return storage._cdata


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
"""Module that FSDP imports when it first shards a module; the import takes about a second."""


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


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return the number of collectives and messages that this rank has started in the group."""
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]


def flight_recorder(device_type: str) -> Callable[..., bytes] | None:
    """Return the function that pickles NCCL's or gloo's last collectives; None if this torch has none.

    Only the settings that make torch's own NCCL watchdog write them are public.
    """
    name = {"cuda": "_dump_nccl_trace", "cpu": "_dump_fr_trace"}.get(device_type, "")
    return getattr(_distributed_c10d, name, None)


def flatten_mesh(mesh: DeviceMesh, name: str, options: Any) -> DeviceMesh:
    """Flatten a mesh's axes into one axis of this name. Public functions only slice meshes.

    Args:
        options: options of its process groups; None for torch's defaults.
    """
    return mesh._flatten(name, options)


# FSDP. Its public methods only reduce gradients during autograd's backward, but zero bubble computes weight
# gradients later.


def unsharded_parameters(module: FSDPModule) -> Iterator[tuple[nn.Parameter, Callable[[], None]]]:
    """Yield a module's full parameters, each with the function that reduces the gradients of its group.

    A group is communicated together, and its parameters are yielded with equal functions. The full parameters
    exist from the first forward on.
    """
    state = module._get_fsdp_state()
    # torch 2.11 has one group for a module, and no list.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        for each in group.fsdp_params:
            yield each.unsharded_param, group.post_backward


def wait_for_reductions(root: FSDPModule) -> None:
    """Make the device wait for the reductions since the last backward pass, and end FSDP's iteration."""
    state = root._get_fsdp_state()
    # Since torch 2.15 only a part of the callback may be called outside of a backward pass.
    getattr(state, "wait_for_gradient_reduction", state._root_post_backward_final_callback)()


def all_gather_waits_for(module: FSDPModule, event: Any) -> None:
    """Make the stream of FSDP's all-gathers wait for an event.

    The public `set_post_optim_event` takes one event for all modules, for the start of the next forward.
    """
    module._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream.wait_event(event)


@contextmanager
def fsdp_on_meta() -> Iterator[None]:
    """Let `fully_shard` shard, all-gather and reduce-scatter meta tensors in this block.

    FSDP takes its streams and events from the module of the device type, ``torch.cuda`` or ``torch.cpu``. In
    ``torch.cpu`` they do nothing. Except on a CPU, FSDP requires that recording an event returns an event,
    and since torch 2.15 that streams have numbers.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard as interface  # seconds to import
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "meta", torch.cpu, create=True))
        stack.enter_context(patch.object(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event()))
        for number in ("stream_id", "device_index", "device_type"):
            stack.enter_context(patch.object(torch.cpu.Stream, number, 0, create=True))
        stack.enter_context(
            patch.object(interface, "_get_device_from_mesh", lambda mesh: torch.device("meta"))
        )
        stack.enter_context(patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None))
        yield
