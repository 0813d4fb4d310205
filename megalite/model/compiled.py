"""Transformer layers compiled by torch.compile, each by itself: one graph serves all that are alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megalite.errors import UserError
from megalite.model.layer import TransformerLayer
from megalite.model.stage import GPTStage
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear

_NEEDS = {"cpu": "a C++ compiler (CXX names one)", "cuda": "Triton and a C compiler (CC names one)"}


def check_compiler(device: torch.device) -> None:
    """Has a first small graph compiled.

    Raises:
        UserError: torch.compile does not work here.
    """
    try:
        torch.compile(_try)(torch.zeros(8, device=device))
    except (RuntimeError, ImportError, OSError) as error:  # what torch.compile raises is a RuntimeError
        needs = _NEEDS.get(device.type, "a compiler")
        raise UserError(
            f"--compile: torch.compile does not work here ({str(error).strip().splitlines()[0]}): install "
            f"{needs}, or leave --compile out"
        ) from error


def _try(x: Tensor) -> Tensor:
    return x.sin() + 1.0


def compile_layers(stage: GPTStage, backend: str = "inductor") -> None:
    """Makes each layer's forward one that is compiled at its first calls, for training and evaluation.

    Hooks of a layer stay outside of the graph, as those that gather its weights (ZeRO stage 3). A linear
    layer that communicates, or stores its weight's gradient for later, is called between graphs: its
    backward overlaps collectives with GEMMs, which a graph of torch.compile does not.

    Args:
        stage: whose layers.
        backend: of torch.compile.
    """
    stage.core.prepare(stage.config.seq_length)
    for layer in stage.layers.values():
        assert isinstance(layer, TransformerLayer)
        if layer.place.tp.size > 1 or layer.place.weight_gradient_store is not None:
            _skip_linear_layers(layer)
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)  # type: ignore[method-assign]


def _skip_linear_layers(layer: TransformerLayer) -> None:
    for module in layer.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    layer.attention.split = torch.compiler.disable(layer.attention.split)


def run_as_written(is_compiled: bool) -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run without their graphs, so that all hooks are called.

    A graph calls no hook that was registered after the graph was made.

    Args:
        is_compiled: whether `compile_layers` was called; without it nothing changes, and torch's compiler is
            not imported.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
