"""Blockwise attention as one operator, which graphs of torch.compile call without tracing into it.

If traced, its blocks would be hundreds of nodes in the graph, and none of them would be fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.kernels import CausalSoftmax, Drop, add_sinks_, sinks_gradient
from megalite.kernels.flash_attention import empty_results
from megalite.kernels.packed_heads import empty_gradients, gradients_of
from megalite.kernels.traced import key_of
from megalite.kernels.visible_keys import VisibleKeys
from megalite.model.blockwise_attention import Blocking, attend, attend_backward

_OP = "megalite::attention"
_BACKWARD = "megalite::attention_backward"
_REST = (
    "Tensor? slopes, Tensor? starts, Tensor? ends, Tensor samples, Tensor key, int? window, int first, "
    "float scale, float p, int base, float? cap, int num_queries, int num_bytes"
)

torch.library.define(_OP, f"(Tensor q, Tensor k, Tensor v, {_REST}, Tensor? sinks) -> (Tensor, Tensor)")
torch.library.define(
    _BACKWARD,
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor sums, {_REST}) -> Tensor[]",
)


def traced_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax, blocking: Blocking, sinks: Tensor | None
) -> Tensor:
    """Compute `attend` with sinks ``[n]`` differentiably, with the dropout key in a tensor."""
    _, scale, slopes, visible, drop, cap = softmax
    starts, ends, window = visible[:3]
    assert drop is not None and drop.key_tensor is not None
    p, _, samples, base, key = drop
    numbers = window, visible.first, scale, p, base, cap
    out: Tensor = torch.ops.megalite.attention(
        q, k, v, slopes, starts, ends, samples, key, *numbers, *blocking, sinks
    )[0]
    return out


def _arguments(
    k: Tensor,
    slopes: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    samples: Tensor,
    key: Tensor,
    window: int | None,
    first: int,
    scale: float,
    p: float,
    base: int,
    cap: float | None,
    *blocking: int,
) -> tuple[CausalSoftmax, Blocking]:
    drop = Drop(p, key_of(key), samples, base)
    visible = VisibleKeys(starts, ends, window, first=first)
    return CausalSoftmax(k.shape[2], scale, slopes, visible, drop, cap), Blocking(*blocking)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *arguments, sinks = rest
    out, sums = attend(q, k, v, *_arguments(k, *arguments))
    if sinks is not None:
        add_sinks_(out, sums, sinks)
    return out, sums


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, *rest: Any) -> list[Tensor]:
    return attend_backward(grad, q, k, v, sums, *_arguments(k, *rest))


torch.library.register_kernel(_OP, None, _forward)
torch.library.register_kernel(_BACKWARD, None, _gradients)


@torch.library.register_fake(_OP)
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


@torch.library.register_fake(_BACKWARD)
def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    return empty_gradients(q, k, v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, starts, ends, samples, key, *ctx.numbers, sinks = inputs
    ctx.set_materialize_grads(False)  # otherwise the second output's gradient would be a tensor of zeros
    of_sinks = (None, None) if sinks is None else (output[0], sinks)
    ctx.save_for_backward(*of_sinks, q, k, v, output[1], slopes, starts, ends, samples, key)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, sinks, *saved = ctx.saved_tensors
    grads = torch.ops.megalite.attention_backward(grad, *saved, *ctx.numbers)
    of_sinks = sinks_gradient(grad, out, saved[3], sinks) if ctx.needs_input_grad[-1] else None
    return *gradients_of(grads), *(None,) * 13, of_sinks


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
