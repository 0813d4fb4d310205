"""Compile transformer layers one at a time: layers with the same shapes share one graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from megalite.kernels.library import compile_problem, tag_compile_caches
from megalite.model.mlp import SharedExpert
from megalite.model.stage import Stage
from megalite.tensor_parallel.linear import ColumnParallelLinear
from megalite.utils.errors import UserError
from megalite.utils.wrapping import Wrapper, communicating_names, eager_names, wrap, wrapped_names

_NEEDS = {"cpu": "a C++ compiler (CXX names one)", "cuda": "Triton and a C compiler (CC names one)"}


def check_compiler(device: torch.device) -> None:
    """Compile a small graph, to test torch.compile.

    Raises:
        UserError: torch.compile does not work on this machine.
    """
    if problem := compile_problem(device.type):
        needs = _NEEDS.get(device.type, "a compiler")
        raise UserError(
            f"--compile: torch.compile does not work here ({problem}): install {needs}, or remove --compile"
        )


def compile_layers(stage: Stage, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer's forward, for training and evaluation. Call it once, at the end.

    Hooks of a layer stay outside of its graph, such as hooks that gather its weights (ZeRO stage 3). Experts
    and their router run between graphs, and a shared expert is a graph of its own.

    Args:
        backend: backend of torch.compile.

    Raises:
        UserError: a layer of your own does not declare its forward with `wrap_point`.
    """
    tag_compile_caches()
    compiled = partial(torch.compile, backend=backend, dynamic=False)
    stage.prepare_tables(stage.config.seq_length)
    for layer in stage.all_layers():
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear):
                module.fuses_gelu = False  # in a graph, autograd computes the linear layers' backward
        communicates = stage.context.tp.size > 1 or stage.context.topology.position_ranks.size > 1
        if communicates or stage.context.weight_gradient_store is not None:
            _communicate_between_graphs(layer)
        _leave_experts_eager(layer, compiled)
        wrap(layer, "forward", compiled)


def _leave_experts_eager(layer: nn.Module, compiled: Wrapper) -> None:
    """Run experts between graphs, because the shapes of their GEMMs depend on the router's choices."""
    for module in layer.modules():
        for name in eager_names(module):
            wrap(module, name, torch.compiler.disable)
        if isinstance(module, SharedExpert):
            wrap(module, "transform", compiled)


def _communicate_between_graphs(layer: nn.Module) -> None:
    """Run the linear layers, and methods that `apply_recompute` has wrapped with them, between graphs.

    The linear layers' backward overlaps collectives with GEMMs, or stores weight gradients. A graph of
    torch.compile can do neither.
    """
    for module in layer.modules():
        for name in wrapped_names(module) | communicating_names(module):
            wrap(module, name, torch.compiler.disable)


def run_as_written(is_compiled: bool) -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run without graphs, so that all hooks are called.

    A graph does not call hooks that were registered after it was compiled.

    Args:
        is_compiled: whether `compile_layers` was called. If not, the context does nothing.
    """
    # torch.compiler imports torch's compiler, which takes seconds.
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
