"""The kernels that are measured, each with the same op as one writes it in PyTorch, and with its reference.

Shapes: s sequence, b microbatch, h hidden size, d head size, v vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite import kernels
from megalite.distributed.axis import Axis
from megalite.kernels import activations, cross_entropy, norm, rotary, token_rows
from megalite.kernels.dropout import backward_reference, sum_reference
from megalite.kernels.dropout import reference as dropout_reference
from megalite.kernels.library import is_eager
from megalite.model.recurrent_mixer import chunked_recurrence
from megalite.tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy

P, KEY, EPSILON = 0.1, kernels.site_key(1, "benchmark"), 1e-5
ONE_RANK = Axis("tp", 1, 0, (0,), None)  # type: ignore[arg-type]

Outputs = Tensor | tuple[Tensor, ...]


class Case(NamedTuple):
    """One op at one shape.

    Attributes:
        inputs: leaves; those of floating point get gradients.
        ours, eager: the op by this library, and as one writes it in PyTorch. They give a tensor or a tuple.
        reference: forward and backward of the reference; backward takes outputs' gradients and inputs.
        passes: tensors of the first input's size that a forward and a backward must move.
    """

    inputs: tuple[Tensor, ...]
    ours: Callable[..., Outputs]
    eager: Callable[..., Outputs]
    reference: tuple[Callable[..., Any], Callable[..., Any]]
    passes: tuple[float, float]


def cases(sizes: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Case]]:
    """Yield the ops at the shapes of one layer, and of the loss."""
    s, b, h, d = sizes.seq_length, sizes.micro_batch_size, sizes.hidden, 64
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    numbers = torch.arange(b, device=device)
    yield "bias + GELU", _gelu(_random(s, b, 4 * h, **kind), _random(4 * h, **kind))
    inner = -(-h * 8 // 3 // 128) * 128  # as Llama's: two thirds of 4 h, in whole tiles of a product
    yield "SwiGLU", _swiglu(_random(s, b, 2 * inner, **kind))
    x, residual, bias = (_random(*shape, **kind) for shape in ((s, b, h), (s, b, h), (h,)))
    yield "dropout", _dropout(x, numbers)
    yield "bias + dropout + residual", _dropout_add(x, bias, residual, numbers)
    weight = _random(h, **kind)
    yield "RMSNorm", _rms_norm(x, weight)
    yield "RMSNorm, residual", _rms_norm_with_residual(x, weight)
    if not is_eager("layer_norm", device.type):  # elsewhere PyTorch's own serves
        yield "LayerNorm", _layer_norm(x, weight, bias)
        yield "sum + LayerNorm", _sum_and_layer_norm(x, residual, weight, bias, numbers)
    yield "rotary", _rotary(_random(s, b, h // d, d, **kind))
    if device.type == "cuda":  # elsewhere plain PyTorch runs
        yield "delta rule", _recurrence(h // 128, 2, 128, s, b, is_delta=True, **kind)
        yield "state space", _recurrence(1, h // 64, 64, s, b, is_delta=False, **kind)
        for name, direction in (("copies of tokens to rows", "copy"), ("sums of tokens' rows", "sum")):
            yield name, _token_rows(direction, s * b, h, **kind)
    yield "cross-entropy", _cross_entropy(_random(s * b, sizes.vocab_size, **kind))


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _gelu(x: Tensor, bias: Tensor) -> Case:
    return Case(
        (x, bias),
        kernels.bias_gelu,
        lambda x, bias: F.gelu(x + bias, approximate="tanh"),
        (activations.gelu_reference, activations.gelu_backward_reference),
        (2, 3),
    )


def _swiglu(x: Tensor) -> Case:
    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    forward, backward = activations.swiglu_reference, activations.swiglu_backward_reference
    reference = (lambda x: forward(x, None)), (lambda grad, x: backward(grad, x, None))
    return Case((x,), lambda x: kernels.bias_swiglu(x, None), eager, reference, (1.5, 2.5))


def _dropout(x: Tensor, numbers: Tensor) -> Case:
    def reference(x: Tensor) -> Tensor:
        return dropout_reference(x, numbers, P, site, 0, x.shape[-1])

    site = kernels.philox.signed64(KEY)
    return Case(
        (x,),
        lambda x: kernels.dropout(x, P, KEY, numbers),
        lambda x: F.dropout(x, P),
        (reference, lambda grad, x: reference(grad)),
        (2, 2),
    )


def _dropout_add(x: Tensor, bias: Tensor, residual: Tensor, numbers: Tensor) -> Case:
    site = (numbers, P, kernels.philox.signed64(KEY), 0)
    return Case(
        (x, bias, residual),
        lambda x, bias, residual: kernels.bias_dropout_add(x, bias, residual, P, KEY, numbers),
        lambda x, bias, residual: residual + F.dropout(x + bias, P),
        (
            lambda x, bias, residual: sum_reference(x, bias, residual, *site),
            lambda grad, *_: backward_reference(grad, *site),
        ),
        (3, 2),
    )


def _rms_norm(x: Tensor, weight: Tensor) -> Case:
    return Case(
        (x, weight),
        lambda x, weight: kernels.rms_norm_on(x.device.type).alone(x, weight, EPSILON),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, EPSILON),
        (
            lambda x, weight: norm.rms_reference(x, weight, EPSILON),
            lambda grad, x, weight: norm.rms_backward_reference(grad, x, weight, EPSILON),
        ),
        (2, 3),
    )


def _rms_norm_with_residual(x: Tensor, weight: Tensor) -> Case:
    def backward(grad: Tensor, residual_grad: Tensor, x: Tensor, weight: Tensor) -> object:
        return norm.rms_backward_reference(grad, x, weight, EPSILON, residual_grad)

    return Case(
        (x, weight),
        lambda x, weight: kernels.rms_norm_on(x.device.type).with_residual(x, weight, EPSILON),
        lambda x, weight: (F.rms_norm(x, weight.shape, weight, EPSILON), x),
        (lambda x, weight: (norm.rms_reference(x, weight, EPSILON), x), backward),
        (2, 4),
    )


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Case:
    return Case(
        (x, weight, bias),
        lambda x, weight, bias: kernels.layer_norm_on(x.device.type).alone(x, weight, bias, EPSILON),
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPSILON),
        (
            lambda x, weight, bias: norm.layer_reference(x, weight, bias, EPSILON),
            lambda grad, x, weight, bias: norm.layer_backward_reference(grad, x, weight, EPSILON),
        ),
        (2, 3),
    )


def _sum_and_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, numbers: Tensor) -> Case:
    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
        total = kernels.ResidualSum(x, bias, residual, P, KEY, numbers)
        return kernels.layer_norm_on(x.device.type).norm_of_sum(total, weight, bias, EPSILON)

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
        total = residual + F.dropout(x + bias, P)
        return F.layer_norm(total, weight.shape, weight, bias, EPSILON), total

    def forward(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
        total = sum_reference(x, bias, residual, *site)
        return norm.layer_reference(total, weight, bias, EPSILON), total

    def backward(
        grad: Tensor, sum_grad: Tensor, x: Tensor, residual: Tensor, weight: Tensor, _: Tensor
    ) -> object:
        of_sum, _ = norm.layer_backward_reference(grad, residual, weight, EPSILON, sum_grad)
        return backward_reference(of_sum, *site)

    site = (numbers, P, kernels.philox.signed64(KEY), 0)
    return Case((x, residual, weight, bias), ours, eager, (forward, backward), (4, 5))


def _rotary(x: Tensor) -> Case:
    angles = torch.randn(x.shape[0], 1, 1, x.shape[-1] // 2, device=x.device).repeat(1, 1, 1, 2)
    cosine, sine = angles.cos(), angles.sin()

    def eager(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)

    return Case(
        (x,),
        lambda x: kernels.rotate(x, cosine, sine),
        eager,
        (
            lambda x: rotary.reference(x, cosine, sine, False),
            lambda grad, x: rotary.reference(grad, cosine, sine, True),
        ),
        (2, 2),
    )


def _token_rows(direction: str, num_tokens: int, width: int, **kind: Any) -> Case:
    """Return a case with 8 experts of each token, whose rows are in a random order."""
    places = torch.randperm(8 * num_tokens, device=kind["device"])
    tokens = places.argsort() // 8
    rows = places, None, 8

    def copy(x: Tensor) -> Tensor:
        return x[tokens]

    def add_up(x: Tensor) -> Tensor:
        return x.new_zeros(num_tokens, width).index_add(0, tokens, x)

    copies, sums = token_rows.copy_reference, token_rows.sum_reference
    if direction == "copy":
        reference = (lambda x: copies(x, *rows)), (lambda grad, _: sums(grad, *rows))
        x, passes = _random(num_tokens, width, **kind), (9, 9)
        return Case((x,), lambda x: token_rows.copy_to_rows(x, *rows), copy, reference, passes)
    reference = (lambda x: sums(x, *rows)), (lambda grad, _: copies(grad, *rows))
    x, passes = _random(8 * num_tokens, width, **kind), (9 / 8, 9 / 8)
    return Case((x,), lambda x: token_rows.sum_rows(x, *rows), add_up, reference, passes)


def _recurrence(
    groups: int,
    sharers: int,
    e: int,
    s: int,
    b: int,
    *,
    is_delta: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Build a recurrence with keys of 128 elements, against the chunks in plain PyTorch."""
    q, k = (F.normalize(torch.randn(s, b, groups, 128, device=device), dim=-1) for _ in range(2))
    v = torch.randn(s, b, groups, sharers, e, device=device)
    step = torch.rand(s, b, groups, sharers, device=device)
    leaves = *(x.to(dtype).requires_grad_() for x in (v, q, k)), step.requires_grad_()

    def ours(v: Tensor, q: Tensor, k: Tensor, step: Tensor) -> Tensor:
        q, k, v, rate = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), _heads_first(v), _heads_first(step)
        return kernels.recurrence(q, k, v, -rate, rate, is_delta=is_delta)[0]

    def chunks(v: Tensor, q: Tensor, k: Tensor, step: Tensor) -> Tensor:
        q, k, v, rate = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), _heads_first(v), _heads_first(step)
        return chunked_recurrence(q, k, v, -rate, rate, is_delta=is_delta)[0]

    def backward(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(chunks(*inputs), inputs, grad)

    return Case(leaves, ours, chunks, (chunks, backward), (4, 7))


def _heads_first(x: Tensor) -> Tensor:
    """Map ``[s, b, g, r, ...]`` to ``[b, g, r, s, ...]``."""
    return x.permute(1, 2, 3, 0, *range(4, x.dim()))


def _cross_entropy(logits: Tensor) -> Case:
    rows, columns = logits.shape
    targets = torch.randint(0, columns, (rows,), device=logits.device)
    statistics: list[Tensor] = []

    def forward(logits: Tensor) -> Tensor:
        found = cross_entropy.statistics_reference(logits, targets, 0, columns)
        statistics[:] = [found[:2]]
        return found[1].log() + found[0] - found[2]

    def backward(grad: Tensor, logits: Tensor) -> None:
        cross_entropy.gradient_reference(logits.detach(), targets, statistics[0], grad, 0, columns)

    return Case(
        (logits,),
        lambda logits: vocab_parallel_cross_entropy(logits, targets, columns, ONE_RANK),
        lambda logits: F.cross_entropy(logits.float(), targets, reduction="none"),
        (forward, backward),
        (1, 2),
    )
