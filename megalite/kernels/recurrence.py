"""Compute a recurrence whose state decays, as in Gated DeltaNet and Mamba-2.

A head has a state S, a matrix that maps keys to values. Each token lets it decay, writes to it and reads it:

    S = exp(decay) S                   zeros first, if the token starts a document
    S = S + rate k (v - S^T k)^T       the delta rule (Yang et al. 2024, arXiv 2412.06464)
    S = S + rate k v^T                 otherwise, as in Mamba-2 (Dao and Gu 2024, arXiv 2405.21060)
    output = S^T q

On CUDA, Triton kernels compute chunks of tokens at once (`triton_recurrence`). They multiply in the precision
of q, k and v, and sum in fp32; decays and states are in fp32. Backward computes the states again.

Shapes: b samples, g query and key heads, r value heads that share one, n = g r, s tokens, d size of a key
head, e size of a value head, m chunks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.kernels.flash_attention import contiguous_rows, has_triton, padded
from megalite.kernels.library import NAMESPACE, compile_problem, define, ensure_ptxas

MAX_HEAD_DIM = 256
"""Largest size of a key or value head in the Triton kernels."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_CAPABILITY = (8, 0)


def recurrence_problem(device: torch.device, dtype: torch.dtype, *head_dims: int) -> str:
    """Return why the Triton kernels do not run on a device, for heads of these sizes; empty if they do.

    If only Triton's ptxas prevents it, this lets Triton use another one; see `ensure_ptxas`.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no GPU"
    if dtype not in _DTYPES:
        return f"no kernels in {dtype}"
    if max(head_dims) > MAX_HEAD_DIM:
        return f"heads of {max(head_dims)} elements, more than {MAX_HEAD_DIM}"
    if not has_triton():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "a GPU of a compute capability below 8.0"
    return compile_problem("cuda") or ensure_ptxas(device)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    *,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, ``[b, g, r, s, e]``, and the last state, ``[b, g, r, d, e]``, in at least fp32.

    Args:
        q, k: ``[b, g, s, d]``.
        v: ``[b, g, r, s, e]``, of the dtype of q and k.
        decay: logarithm of the factor of the state, at most 0, ``[b, g, r, s]``, in at least fp32.
        rate: ``[b, g, r, s]``, in at least fp32.
        starts: first token of each token's document, ``[b, s]``; negative if it starts before these tokens.
            None if each sample is one document.
        state: state before the first token, in at least fp32; None for zeros.
        is_delta: write by the delta rule.
    """
    results: tuple[Tensor, Tensor] = torch.ops.megalite.recurrence(
        q, k, v, decay, rate, starts, state, is_delta
    )
    return results


def reference(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Implement the operator in plain PyTorch, token by token."""
    q, k, v, decay, rate, starts, state, is_delta = arguments
    out, last = _empty_results(q, v)
    q, k, v, rate = (x.to(out.dtype) for x in (q, k, v, rate))
    current = torch.zeros_like(last) if state is None else state
    for t, kept in enumerate(_kept(decay, starts)):
        query, key, value, step = _token(t, q, k, v, rate)
        current = current * kept
        change = value - key.mT @ current if is_delta else value
        current = current + key @ (change * step)
        out[..., t, :] = (query.mT @ current).squeeze(-2)
    return out, last.copy_(current)


def reference_backward(grad: Tensor, grad_last: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Compute the gradients of q, k, v, decay, rate and state in plain PyTorch, from the last token on."""
    q, k, v, decay, rate, starts, state, is_delta = arguments
    results = _empty_gradients(q, k, v, decay, rate)
    grad_q, grad_k, grad_v, grad_decay, grad_rate, grad_state = results
    q, k, v, rate = (x.to(grad_state.dtype) for x in (q, k, v, rate))
    current = torch.zeros_like(grad_state) if state is None else state
    kept, states = _kept(decay, starts), []
    for t, factor in enumerate(kept):
        states.append(current)
        _, key, value, step = _token(t, q, k, v, rate)
        current = current * factor
        current = current + key @ ((value - key.mT @ current if is_delta else value) * step)
    grad_current = torch.zeros_like(grad_state) if grad_last is None else grad_last
    for t in reversed(range(len(states))):
        query, key, value, step = _token(t, q, k, v, rate)
        grad_output = grad[..., t, None, :]  # [b, g, r, 1, e]
        before = states[t] * kept[t]
        change = value - key.mT @ before if is_delta else value
        after = before + key @ (change * step)
        grad_q[:, :, t] = (after @ grad_output.mT).sum(2).squeeze(-1)
        grad_current = grad_current + query @ grad_output
        grad_written = key.mT @ grad_current  # [b, g, r, 1, e], gradient of change * step
        grad_key = grad_current @ (change * step).mT
        if is_delta:
            grad_key = grad_key - before @ (grad_written * step).mT
            grad_current = grad_current - key @ (grad_written * step)
        grad_k[:, :, t] = grad_key.sum(2).squeeze(-1)
        grad_v[..., t, :] = (grad_written * step).squeeze(-2)
        grad_rate[..., t] = (grad_written * change).sum((-2, -1))
        grad_decay[..., t] = (grad_current * before).sum((-2, -1))
        grad_current = grad_current * kept[t]
    grad_state.copy_(grad_current)
    return results


def _kept(decay: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Return the factor of the state at each token, ``[b, g, r, 1, 1]``."""
    kept = decay.exp()
    if starts is not None:
        positions = torch.arange(starts.shape[1], device=starts.device)
        kept = kept * (starts < positions)[:, None, None]
    return [*kept[..., None, None].unbind(3)]


def _token(t: int, q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a token's query and key ``[b, g, 1, d, 1]``, value ``[b, g, r, 1, e]`` and rate."""
    query, key = (x[:, :, None, t, :, None] for x in (q, k))
    return query, key, v[..., t, None, :], rate[..., t, None, None]


class RecurrenceSizes(NamedTuple):
    """Block sizes of the kernels.

    Attributes:
        tokens: tokens of a chunk, C.
        columns: value elements in a block of the kernels that loop over chunks.
        values: value elements in a block of the other kernels, V.
        keys: key elements in a block, K.
        warps: number of warps of 32 threads.
        input_warps: the same of the kernel for the gradients of inputs.
        stages: pipeline stages: one more than the number of blocks that are loaded ahead.
    """

    tokens: int
    columns: int
    values: int
    keys: int
    warps: int
    input_warps: int
    stages: int


SIZES: dict[tuple[int, int], RecurrenceSizes] = {
    (2, 64): RecurrenceSizes(64, 32, 64, 64, 4, 8, 2),
    (2, 128): RecurrenceSizes(64, 32, 64, 64, 4, 8, 2),
    (2, 256): RecurrenceSizes(64, 16, 32, 64, 8, 8, 1),
    (4, 64): RecurrenceSizes(32, 16, 32, 32, 8, 8, 1),
    (4, 128): RecurrenceSizes(32, 16, 32, 32, 8, 8, 1),
    (4, 256): RecurrenceSizes(16, 16, 16, 32, 8, 8, 1),
}
"""Sizes by bytes per element and key size, rounded up to a power of two.

They were chosen from the machine code for A100 and Hopper (`compile_recurrence` in
benchmarks/triton_kernels.py). They have not been measured on a GPU.
"""


def launch(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the kernels of the forward."""
    from megalite.kernels import triton_recurrence as kernels  # imports Triton, which a CPU does not need

    q, k, v, decay, rate, starts, state, is_delta = arguments
    out, last = _empty_results(q, v)
    if v.numel() == 0:
        return out, last.zero_() if state is None else last.copy_(state)
    q, k, v, decay, rate = _for_kernels(q, k, v, decay, rate)
    starts, state = (None if x is None else x.contiguous() for x in (starts, state))
    sizes, numbers = sizes_for(q), _numbers(q, v)
    with torch.cuda.device_of(q):
        states, errors, _ = _states(last, q, k, v, decay, rate, starts, state, is_delta)
        kernels.outputs_kernel[_by_chunk(q, v)](
            *(q, k, errors, decay, rate, starts, states, out),
            *(_strides(x) for x in (q, k, errors, out)),
            *numbers,
            **_constants(q, D=padded(q.shape[-1]), V=block_size(sizes.values, v)),
        )
    return out, last


def launch_backward(grad: Tensor, grad_last: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Run the kernels of the backward; the forward's kernels compute the states again."""
    from megalite.kernels import triton_recurrence as kernels

    q, k, v, decay, rate, starts, state, is_delta = arguments
    results = _empty_gradients(q, k, v, decay, rate)
    if v.numel() == 0:
        grad_state = results[5].zero_() if grad_last is None else grad_last.clone()
        return [*(x.zero_() for x in results[:5]), grad_state]
    (b, g, r, s, e), d = v.shape, q.shape[-1]
    q, k, v, decay, rate = _for_kernels(q, k, v, decay, rate)
    starts, state, grad_last = (None if x is None else x.contiguous() for x in (starts, state, grad_last))
    grad = contiguous_rows(grad)
    grad_v, grad_decay, grad_rate, grad_state = results[2:]
    wide = grad_state.dtype
    grad_queries, grad_keys = (q.new_empty(b, g, r, s, d, dtype=wide) for _ in range(2))
    sizes, numbers, grid = sizes_for(q), _numbers(q, v), _by_chunk(q, v)
    in_chunk = _constants(q, D=padded(d), V=block_size(sizes.values, v))
    with torch.cuda.device_of(q):
        states, errors, inverses = _states(
            torch.empty_like(grad_state), q, k, v, decay, rate, starts, state, is_delta
        )
        grad_changes, grad_states = v.new_empty(b, g, r, s, e, dtype=wide), torch.empty_like(states)
        kernels.chunk_gradients_kernel[grid](
            *(q, k, grad, decay, starts, grad_changes),
            *(_strides(x) for x in (q, k, grad)),
            *numbers,
            **in_chunk,
        )
        columns = block_size(sizes.columns, v)
        kernels.state_gradients_kernel[-(-e // columns), g * r, b](
            *(q, k, grad, decay, rate, starts, inverses, grad_changes, grad_last, grad_v),
            *(grad_states, grad_state),
            *(_strides(x) for x in (q, k, grad, grad_v)),
            *numbers,
            **_constants(q, D=padded(d), V=columns),
        )
        by_blocks = {"K": min(sizes.keys, padded(d)), "V": in_chunk["V"], "num_warps": sizes.input_warps}
        kernels.input_gradients_kernel[grid](
            *(q, k, errors, grad, grad_v, decay, rate, starts, states, grad_states),
            *(grad_queries, grad_keys, grad_decay, grad_rate),
            *(_strides(x) for x in (q, k, errors, grad, grad_v, grad_keys)),
            *numbers,
            is_delta,
            **_constants(q, **by_blocks),
        )
    for result, per_head in zip(results, (grad_queries, grad_keys), strict=False):
        torch.sum(per_head, 2, out=result) if result.dtype == wide else result.copy_(per_head.sum(2))
    return results


def _states(last: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the states before all chunks, ``[b, n, m, d, e]``, and the last one.

    Returns:
        The states; the values that are written, of the shape of v; and the inverses of the delta rule,
        ``[b, n, m, C, C]``.
    """
    from megalite.kernels import triton_recurrence as kernels

    q, k, v, decay, rate, starts, state, is_delta = arguments
    (b, g, r, s, e), d, n = v.shape, q.shape[-1], v.shape[1] * v.shape[2]
    sizes, numbers = sizes_for(q), _numbers(q, v)
    m, columns = -(-s // sizes.tokens), block_size(sizes.columns, v)
    inverses, errors = None, v
    if is_delta:
        inverses, errors = q.new_empty(b, n, m, sizes.tokens, sizes.tokens), v.new_empty(b, g, r, s, e)
        kernels.inverses_kernel[m, n, b](
            *(k, decay, rate, starts, inverses, _strides(k), *numbers[:-1]), **_constants(q, D=padded(d))
        )
    states = q.new_empty(b, n, m, d, e)
    kernels.states_kernel[-(-e // columns), n, b](
        *(k, v, decay, rate, starts, inverses, state, errors, states, last),
        *(_strides(x) for x in (k, v, errors)),
        *numbers,
        **_constants(q, D=padded(d), V=columns),
    )
    return states, errors, inverses


def sizes_for(q: Tensor) -> RecurrenceSizes:
    """Return the block sizes of the kernels for queries ``[..., d]``."""
    return SIZES[q.dtype.itemsize, max(64, padded(q.shape[-1]))]


def block_size(size: int, v: Tensor) -> int:
    """Return the value elements in a block of at most this size."""
    return min(size, padded(v.shape[-1]))


def _by_chunk(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return the grid of a kernel whose programs have a chunk of a head."""
    b, g, r, s, _ = v.shape
    return -(-s // sizes_for(q).tokens), g * r, b


def _numbers(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the arguments of all kernels from n to e."""
    _, g, r, s, e = v.shape
    return g * r, r, s, q.shape[-1], e


def _constants(q: Tensor, **options: int) -> dict[str, Any]:
    """Return the compile-time constants and the options of a kernel."""
    sizes = sizes_for(q)
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "PRECISION": "tf32" if is_tf32 or q.dtype != torch.float32 else "ieee",
        "C": sizes.tokens,
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
        "enable_fp_fusion": True,  # Triton 3.9 warns without it: 3.10 plans another default
        **options,
    }


def _for_kernels(q: Tensor, k: Tensor, v: Tensor, *numbers: Tensor) -> list[Tensor]:
    """Return queries, keys and values with contiguous rows, and contiguous numbers of tokens."""
    return [*map(contiguous_rows, (q, k, v)), *(x.contiguous() for x in numbers)]


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:-1]


def _like_sequence(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of this shape in the memory order of the hidden states, with the tokens first."""
    b, *heads, s, size = x.shape
    order = (*range(1, x.dim() - 1), 0, x.dim() - 1)
    return x.new_empty(s, b, *heads, size, dtype=dtype).permute(order)


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _like_sequence(v, wide), v.new_empty(*v.shape[:3], q.shape[-1], v.shape[-1], dtype=wide)


def _empty_gradients(*arguments: Tensor) -> list[Tensor]:
    """Allocate the gradients of q, k, v, decay, rate and state."""
    q, k, v, decay, rate = arguments
    grad_inputs = [_like_sequence(x, x.dtype) for x in (q, k, v)]
    grad_numbers = [x.new_empty(x.shape) for x in (decay, rate)]
    return [*grad_inputs, *grad_numbers, _empty_results(q, v)[1]]


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q, v)


def _fake_gradients(grad: Tensor, grad_last: Tensor | None, *arguments: Any) -> list[Tensor]:
    return _empty_gradients(*arguments[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_delta = inputs
    ctx.set_materialize_grads(False)  # otherwise the last state's gradient would be a tensor of zeros
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(_empty_results(tensors[0], tensors[2])[0])
    *grads, grad_state = torch.ops.megalite.recurrence_backward(grad, grad_last, *tensors, ctx.is_delta)
    return *grads, None, grad_state if ctx.needs_input_grad[6] else None, None


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor? starts, Tensor? state, bool is_delta"
)

define("recurrence", f"({_ARGUMENTS}) -> (Tensor, Tensor)", reference, _fake, save=_save, backward=_backward)
define(
    "recurrence_backward",
    f"(Tensor grad, Tensor? grad_last, {_ARGUMENTS}) -> Tensor[]",
    reference_backward,
    _fake_gradients,
)
if has_triton():
    torch.library.impl(f"{NAMESPACE}::recurrence", "CUDA", launch)
    torch.library.impl(f"{NAMESPACE}::recurrence_backward", "CUDA", launch_backward)
