"""Copy tokens to the rows of their experts, and sum each token's rows.

Each operator is the backward of the other one. A row has a place in the experts' order, in which the rows of
each expert are consecutive.

Shapes: t tokens, h features, k experts of a token, n rows: t k, or less if experts drop tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.library import define

_BLOCK = 1024  # features of a program of the Triton kernels


def copy_to_rows(x: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    """Copy each token of ``[t, h]`` to its rows, ``[n, h]``.

    Args:
        places: of the rows, int64 ``[n]``, in the order of the tokens. Each number below n occurs once.
        starts: number of rows of the tokens before each token, int64 ``[t]``. None if each token has k rows.
        num_selected: k; with `starts`, the largest number of rows of a token.
    """
    rows: Tensor = torch.ops.megalite.copy_to_rows(x, places, starts, num_selected)
    return rows


def sum_rows(rows: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    """Sum each token's rows of ``[n, h]`` to ``[t, h]``, in the order of `places`.

    Sums are in at least fp32, and rounded once.

    Args:
        places, starts, num_selected: see `copy_to_rows`.
    """
    x: Tensor = torch.ops.megalite.sum_rows(rows, places, starts, num_selected)
    return x


def copy_reference(x: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    """Implement `copy_to_rows` in plain PyTorch."""
    numbers = torch.arange(len(x), device=x.device)
    if starts is None:
        token_numbers = numbers.repeat_interleave(num_selected)
    else:
        counts = starts.diff(append=starts.new_full((1,), len(places)))
        token_numbers = numbers.repeat_interleave(counts, output_size=len(places))
    return x.index_select(0, torch.empty_like(places).scatter_(0, places, token_numbers))


def sum_reference(rows: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    """Implement `sum_rows` in plain PyTorch."""
    if starts is not None:
        return F.embedding_bag(places, rows, starts, mode="sum")
    return F.embedding_bag(places.view(-1, num_selected), rows, mode="sum")


def launch_copy(x: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    """Run the Triton kernel of `copy_to_rows`."""
    from megalite.kernels import triton_token_rows as kernels  # imports Triton, which a CPU does not need

    rows = x.new_empty(len(places), x.shape[1])
    _launch(kernels.copy_kernel, x.contiguous(), rows, len(x), places, starts, num_selected)
    return rows


def launch_sum(rows: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    """Run the Triton kernel of `sum_rows`."""
    from megalite.kernels import triton_token_rows as kernels

    x = rows.new_empty(_num_tokens(places, starts, num_selected), rows.shape[1])
    _launch(kernels.sum_kernel, rows.contiguous(), x, len(x), places, starts, num_selected)
    return x


def _launch(
    kernel: Any, source: Tensor, out: Tensor, num_tokens: int, places: Tensor, starts: Tensor | None, k: int
) -> None:
    if not out.numel():
        return
    width = out.shape[1]
    n = min(_BLOCK, 1 << max(4, (width - 1).bit_length()))
    with torch.cuda.device_of(out):
        kernel[(num_tokens, -(-width // n))](
            *(source, out, places, starts, num_tokens, len(places), width),
            K=k,
            N=n,
            enable_fp_fusion=False,
        )


def _num_tokens(places: Tensor, starts: Tensor | None, num_selected: int) -> int:
    return len(places) // num_selected if starts is None else len(starts)


def _fake_copy(x: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    return x.new_empty(len(places), x.shape[1])


def _fake_sum(rows: Tensor, places: Tensor, starts: Tensor | None, num_selected: int) -> Tensor:
    return rows.new_empty(_num_tokens(places, starts, num_selected), rows.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, places, starts, ctx.num_selected = inputs
    ctx.save_for_backward(places, starts)


def _backward_of_copy(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    places, starts = ctx.saved_tensors
    return sum_rows(grad, places, starts, ctx.num_selected), None, None, None


def _backward_of_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    places, starts = ctx.saved_tensors
    return copy_to_rows(grad, places, starts, ctx.num_selected), None, None, None


define(
    "copy_to_rows",
    "(Tensor x, Tensor places, Tensor? starts, int num_selected) -> Tensor",
    copy_reference,
    _fake_copy,
    save=_save,
    backward=_backward_of_copy,
    triton=launch_copy,
)
define(
    "sum_rows",
    "(Tensor rows, Tensor places, Tensor? starts, int num_selected) -> Tensor",
    sum_reference,
    _fake_sum,
    save=_save,
    backward=_backward_of_sum,
    triton=launch_sum,
)
