"""Compute attention in one kernel, without storing the scores.

It has ALiBi, documents, windows, capped scores, sinks and dropout. On CUDA the kernels are written in Triton
(`triton_attention`). The dropout masks are bitwise the same as in `CausalSoftmax`. The operators take the
dropout key in a tensor on the host, so that all layers share one graph of torch.compile.

Shapes: b samples, n query heads, g key/value heads, s sequence, d head size. The m queries are all s, or a
slice of them. So are the e keys in ring attention, which merges the results of several slices.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.kernels.dropout import keep_threshold, key_from_tensor, key_tensor
from megalite.kernels.library import NAMESPACE, define
from megalite.kernels.packed_heads import empty_gradients, empty_results, gradients_of
from megalite.kernels.softmax import (
    CausalSoftmax,
    Drop,
    VisibleKeys,
    biased_scores,
    finish_,
    keep_factors,
    parameter_gradient,
)

MAX_HEAD_DIM = 256


class Operands(NamedTuple):
    """Arguments of both operators from `slopes` to `window`, with the schema's defaults.

    Attributes:
        key: scalar on the host; None without dropout.
        start, key_start: positions of the first query and of the first key.
        seq_length: length of the whole sequence; None if the keys are all of it.
        window: see `VisibleKeys`; the Triton kernels read it from `starts`.
    """

    slopes: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    samples: Tensor | None
    key: Tensor | None
    scale: float
    p: float
    base: int
    cap: float | None = None
    start: int = 0
    key_start: int = 0
    seq_length: int | None = None
    window: int | None = None

    def softmax(self, num_keys: int) -> CausalSoftmax:
        """Return the softmax that `operands` was called with, without sinks."""
        drop = None
        if self.samples is not None and self.key is not None:
            drop = Drop(self.p, key_from_tensor(self.key), self.samples, self.base)
        visible = VisibleKeys(self.starts, self.ends, self.window, first=self.start)
        return CausalSoftmax(self.seq_length or num_keys, self.scale, self.slopes, visible, drop, self.cap)


def has_triton() -> bool:
    """Return whether Triton is installed. CUDA builds of torch include it."""
    return importlib.util.find_spec("triton") is not None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax) -> Tensor:
    """Return dropout(softmax(scale * q k^T + bias)) v, ``[b, n, m, d]``.

    Args:
        q: ``[b, n, m, d]``, bf16, fp16 or fp32; the queries from position `first` of the visible keys on.
        k: ``[b, g, s, d]``; n/g query heads share a key/value head.
        v: ``[b, g, s, d]``.
        softmax: bias, visible keys, dropout and sinks. The `starts` of the keys do not decrease within a
            sample. If the keys have `ends`, they also have `starts`, and each query sees its whole document:
            a document ends where the next one starts.
    """
    rest = operands(softmax, softmax.visible.first)
    out: Tensor = torch.ops.megalite.flash_attention(q, k, v, *rest, *softmax.parameters)[0]
    return out


def operands(softmax: CausalSoftmax, first: int, first_key: int = 0) -> Operands:
    """Return the operators' arguments for queries and keys from these positions on."""
    s, scale, slopes, visible, drop, cap, _ = softmax
    starts, ends = (None if x is None else x.contiguous() for x in visible[:2])
    assert ends is None or starts is not None
    site: tuple[Tensor | None, Tensor | None, float, float, int] = None, None, scale, 0.0, 0
    if drop is not None and drop.p > 0.0:
        p, key, samples, base, tensor = drop
        site = samples.contiguous(), key_tensor(key) if tensor is None else tensor, scale, p, base
    return Operands(slopes, starts, ends, *site, cap, first, first_key, s, visible.window)


def reference(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Implement the forward in plain PyTorch, with all scores in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    x, kept, _ = _scores(q.to(wide) @ keys.mT, Operands(*rest))
    log_sums = x.logsumexp(-1)
    # A query that sees none of the keys: exp(-inf - 0) is 0.
    weights = (x - log_sums.where(log_sums > -torch.inf, 0.0)[..., None]).exp_() * kept
    out, _ = empty_results(q, v)
    return out.copy_(weights @ values), log_sums


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *rest: Any
) -> list[Tensor]:
    """Compute the gradients of q, k and v in plain PyTorch, as `empty_gradients` allocates them."""
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.to(log_sums.dtype).repeat_interleave(shared, dim=1) for x in (k, v))
    queries, grads = q.to(log_sums.dtype), grad.to(log_sums.dtype)
    x, kept, slope = _scores(queries @ keys.mT, Operands(*rest))
    weights = (x - log_sums[..., None]).exp_()
    delta = (grads * out).sum(-1, keepdim=True)
    score_grads = weights * (grads @ values.mT * kept - delta) * slope
    grad_k, grad_v = (
        x.unflatten(1, (-1, shared)).sum(2) for x in (score_grads.mT @ queries, (weights * kept).mT @ grads)
    )
    results = empty_gradients(q, k, v)
    for result, value in zip(gradients_of(results), (score_grads @ keys, grad_k, grad_v), strict=True):
        result.copy_(value)
    return results


def _scores(products: Tensor, o: Operands) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Return scores from ``[b, n, m, e]``, overwritten, dropout's factors, and the scores' derivatives.

    Hidden keys have a score of -inf.
    """
    softmax = o.softmax(products.shape[3])
    softmax.cap_(products)
    slope = softmax.cap_slope(products)
    slopes, starts, ends, samples, scale, p, key, base, *where = softmax.arguments(o.start)
    x = biased_scores(products, slopes, starts, ends, scale, o.start, o.key_start)
    kept = keep_factors(x, samples, p, key, base + o.key_start, *where)
    return x, kept, scale if slope is None else slope


class BlockSizes(NamedTuple):
    """Block sizes of one program of a kernel.

    Attributes:
        queries: queries in a block, M.
        keys: keys in a block, N.
        warps: number of warps of 32 threads.
        stages: pipeline stages: one more than the number of blocks that are loaded ahead.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class KernelSizes(NamedTuple):
    """Block sizes of the kernels.

    Attributes:
        forward: for the output.
        key_gradients: for the gradients of keys, and of values without `value_gradients`.
        query_gradients: for the gradients of queries.
        value_gradients: for the gradients of values in a launch of their own.
    """

    forward: BlockSizes
    key_gradients: BlockSizes
    query_gradients: BlockSizes
    value_gradients: BlockSizes | None = None


SIZES: dict[tuple[int, int], KernelSizes] = {
    (2, 64): KernelSizes(BlockSizes(128, 64, 8, 3), BlockSizes(32, 128, 8, 3), BlockSizes(128, 64, 8, 3)),
    (2, 128): KernelSizes(BlockSizes(128, 64, 8, 3), BlockSizes(32, 128, 8, 2), BlockSizes(128, 64, 8, 2)),
    (2, 256): KernelSizes(
        BlockSizes(128, 32, 8, 3),
        BlockSizes(32, 128, 8, 2),
        BlockSizes(128, 32, 8, 2),
        BlockSizes(32, 128, 8, 2),
    ),
    (4, 64): KernelSizes(BlockSizes(64, 32, 8, 2), BlockSizes(32, 64, 8, 2), BlockSizes(64, 32, 8, 2)),
    (4, 128): KernelSizes(BlockSizes(32, 16, 8, 2), BlockSizes(32, 32, 8, 2), BlockSizes(32, 32, 8, 2)),
    (4, 256): KernelSizes(BlockSizes(16, 32, 8, 1), BlockSizes(16, 16, 8, 1), BlockSizes(16, 16, 8, 1)),
}
"""Sizes by bytes per element and head size, rounded up to a power of two.

They were chosen from the machine code for Hopper (benchmarks/kernel_limits.py). They have not been measured
on a GPU. There, 4 warps multiply 64 rows with one instruction (WGMMA). With 8 warps, a block needs 128 rows
(queries, or keys in the kernel of their gradients); with fewer rows, both halves of the warps compute all
scores. At head size 256 in 16 bits, the registers of 8 warps hold the sums of 128 keys or of 128 values, but
not both. The two gradients are therefore computed by separate launches.
"""
SMALL_SIZES: dict[tuple[int, int], KernelSizes] = {
    (2, 64): SIZES[2, 64]._replace(query_gradients=BlockSizes(128, 32, 8, 3)),
    (2, 128): KernelSizes(BlockSizes(128, 32, 8, 3), BlockSizes(64, 64, 8, 2), BlockSizes(64, 32, 4, 3)),
    (2, 256): KernelSizes(
        BlockSizes(64, 32, 4, 2), BlockSizes(32, 32, 4, 2), BlockSizes(32, 32, 4, 2), BlockSizes(32, 64, 4, 2)
    ),
}
"""Different sizes for GPUs with less shared memory than `LARGE_MEMORY`, which multiply with `mma.sync`."""
BLACKWELL_SIZES: dict[tuple[int, int], KernelSizes] = {
    (2, head_dim): SIZES[2, head_dim]._replace(key_gradients=BlockSizes(64, 128, 8, 2))
    for head_dim in (64, 128)
}
"""Different sizes for compute capability 10, where GEMMs run in tensor memory (tcgen05).

Sums take no registers there, so that blocks of key gradients can have twice as many queries.
"""
LARGE_MEMORY = 227 << 10
"""Bytes of shared memory per program on H100 and B200; A100 has 163 KiB, other GPUs at least 99 KiB."""
_DELTA_ROWS = 64


def kernel_sizes(q: Tensor) -> KernelSizes:
    """Return the sizes for queries ``[b, n, m, d]``, with d at most `MAX_HEAD_DIM`."""
    kind = q.dtype.itemsize, max(64, padded(q.shape[-1]))
    if q.is_cuda:
        properties: Any = torch.cuda.get_device_properties(q.device)
        sizes = different_sizes(properties.major, properties.shared_memory_per_block_optin)
        return sizes.get(kind, SIZES[kind])
    return SIZES[kind]


def different_sizes(major: int, shared_memory: int) -> dict[tuple[int, int], KernelSizes]:
    """Return the sizes that differ from `SIZES` on a GPU.

    Args:
        major: first number of its compute capability.
        shared_memory: bytes of shared memory per program.
    """
    if shared_memory < LARGE_MEMORY:
        return SMALL_SIZES
    return BLACKWELL_SIZES if major == 10 else {}


def padded(head_dim: int) -> int:
    """Return the head size of a compiled kernel: a power of two of at least 16, as Triton's GEMMs need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _numbers(q: Tensor, k: Tensor, o: Operands) -> tuple[Any, ...]:
    """Return the arguments of all kernels from n to factor."""
    (n, m), (g, e) = q.shape[1:3], k.shape[1:3]
    s = o.seq_length or e
    slices = [
        (None, None) if count == s else (count, first) for count, first in ((m, o.start), (e, o.key_start))
    ]
    site = 0 if o.key is None else int(o.key), o.base, keep_threshold(o.p), 1.0 / (1.0 - o.p)
    return n, n // g, s, *slices[0], *slices[1], o.scale, o.cap, *site


def _constants(k: Tensor, o: Operands, sizes: BlockSizes) -> dict[str, Any]:
    """Return the compile-time constants of a kernel."""
    e, d = k.shape[2:]
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "d": d,
        "D": padded(d),
        "M": sizes.queries,
        "N": sizes.keys,
        "PRECISION": "tf32" if is_tf32 or k.dtype != torch.float32 else "ieee",
        "ALIGNED": all(each % 4 == 0 for each in (o.base, o.key_start, o.seq_length or e)),
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
        "enable_fp_fusion": True,  # Triton 3.9 warns without it: 3.10 plans another default
    }


def contiguous_rows(x: Tensor) -> Tensor:
    """Return the tensor with contiguous rows (the last dim), which the kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [x.stride()[:3] for x in tensors]


def launch(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Run the forward kernel."""
    from megalite.kernels import triton_attention as kernels  # imports Triton, which a CPU does not need

    o = Operands(*rest)
    q, k, v = map(contiguous_rows, (q, k, v))
    out, log_sums = empty_results(q, v)
    b, n, m, _ = q.shape
    if q.numel() == 0:
        return out, log_sums
    sizes = kernel_sizes(q).forward
    with torch.cuda.device_of(q):
        kernels.forward_kernel[-(-m // sizes.queries), n, b](
            *(q, k, v, out, log_sums, o.slopes, o.starts, o.ends, o.samples),
            *_strides(q, k, v, out),
            *_numbers(q, k, o),
            **_constants(k, o, sizes),
        )
    return out, log_sums


def launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *rest: Any
) -> list[Tensor]:
    """Run the kernels of the gradients of q, k and v, as `empty_gradients` allocates them."""
    from megalite.kernels import triton_attention as kernels

    o = Operands(*rest)
    grad, q, k, v = map(contiguous_rows, (grad, q, k, v))
    results = empty_gradients(q, k, v)
    grad_q, grad_k, grad_v = gradients_of(results)
    delta = torch.empty_like(log_sums)
    (b, n, m, d), (g, e) = q.shape, k.shape[1:3]
    if q.numel() == 0:
        return results
    _, key_sizes, query_sizes, value_sizes = kernel_sizes(q)
    # Block sizes, and the gradients that a launch computes.
    launches: list[tuple[BlockSizes, Tensor | None, Tensor | None]] = [(key_sizes, grad_k, grad_v)]
    if value_sizes is not None:
        launches = [(key_sizes, grad_k, None), (value_sizes, None, grad_v)]
    numbers, visible = _numbers(q, k, o), (o.slopes, o.starts, o.ends)
    # This takes about 10 us in each layer, whose backward takes 1 ms. To compute it only once per microbatch,
    # both operators would need another argument.
    query_ends = _query_ends(o.starts) if o.ends is None else o.ends
    with torch.cuda.device_of(q):
        kernels.delta_kernel[-(-m // _DELTA_ROWS), n, b](
            *(out, grad, delta, *_strides(out, grad), n, m),
            **{"d": d, "M": _DELTA_ROWS, "D": padded(d), "enable_fp_fusion": True},
        )
        for sizes, into_k, into_v in launches:
            kernels.key_gradients_kernel[-(-e // sizes.keys), g, b](
                *(q, k, v, grad, into_k, into_v, log_sums, delta, *visible, query_ends, o.samples),
                *_strides(q, k, v, grad, grad_k, grad_v),
                *numbers,
                **_constants(k, o, sizes),
            )
        kernels.query_gradients_kernel[-(-m // query_sizes.queries), n, b](
            *(q, k, v, grad, grad_q, log_sums, delta, *visible, o.samples),
            *_strides(q, k, v, grad, grad_q),
            *numbers,
            **_constants(k, o, query_sizes),
        )
    return results


def _query_ends(starts: Tensor | None) -> Tensor | None:
    """Return, for each key, the position after the last query that attends to it, int64 ``[b, s]``.

    This is for causal attention.
    """
    if starts is None:
        return None
    positions = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return torch.searchsorted(starts, positions.contiguous(), right=True)


def define_attention(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., list[Tensor]],
    *,
    keeps_output: bool = True,
) -> None:
    """Define the operators NAME and NAME_backward of attention, the first one with autograd and sinks.

    Args:
        forward: maps queries, keys, values and `Operands` to output and logarithms of the sums without sinks.
        backward: maps the output's gradient, queries, keys, values, forward's results and `Operands` to
            gradients as `empty_gradients` allocates them. It need not know of sinks.
        keeps_output: whether `backward` needs the output, which is None otherwise.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, slopes, starts, ends, samples, key, *ctx.numbers, sinks = inputs
        ctx.set_materialize_grads(False)  # otherwise the second output's gradient would be a tensor of zeros
        out = output[0] if keeps_output or sinks is not None else None
        ctx.save_for_backward(q, k, v, out, output[1], slopes, starts, ends, samples, key, sinks)

    def gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        of_sinks = parameter_gradient(grad, saved[3], saved[4], sinks) if ctx.needs_input_grad[-1] else None
        if not keeps_output:
            saved[3] = None
        grads = getattr(torch.ops.megalite, f"{name}_backward")(grad, *saved, *ctx.numbers)
        return *gradients_of(grads), *(None,) * len(Operands._fields), of_sinks

    arguments = (
        "Tensor? slopes, Tensor? starts, Tensor? ends, Tensor? samples, Tensor? key, float scale, float p, "
        "int base, float? cap=None, int start=0, int key_start=0, int? seq_length=None, int? window=None"
    )
    schema = f"(Tensor q, Tensor k, Tensor v, {arguments}, Tensor? sinks=None) -> (Tensor, Tensor)"
    define(name, schema, with_sinks(forward), _fake, save=save, backward=gradients)
    heads = "Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor log_sums"
    define(f"{name}_backward", f"({heads}, {arguments}) -> Tensor[]", backward, _fake_gradients)


def with_sinks(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator's implementation from a forward without sinks, whose results then get them."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        num_operands = len(Operands._fields)
        results = forward(q, k, v, *rest[:num_operands])
        finish_(*results, *(sinks for sinks in rest[num_operands:] if sinks is not None))
        return results

    return run


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return empty_gradients(q, k, v)


define_attention("flash_attention", reference, reference_backward)
if has_triton():
    torch.library.impl(f"{NAMESPACE}::flash_attention", "CUDA", with_sinks(launch))
    torch.library.impl(f"{NAMESPACE}::flash_attention_backward", "CUDA", launch_backward)
