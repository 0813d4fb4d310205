"""Compute a gated recurrence in Triton, chunk by chunk (Yang et al. 2024; Dao and Gu 2024).

`megalite.kernels.recurrence` defines the recurrence. Let S be the state before a chunk, g_i the sum of the
decays of its tokens up to token i, and w_j = rate_j k_j. A token sees the tokens of its document up to its
own, and S if the document starts before the chunk. For one head:

    B_ij = exp(g_i - g_j) if token i sees token j                          0 otherwise
    c_i  = exp(g_i) if token i sees S                                      0 otherwise
    L_ij = B_ij k_i·w_j for j < i
    E    = (I + L)^-1 (V - c K S)                  delta rule; otherwise E = V
    Y    = c Q S + (B * Q W^T) E
    S'   = c_last S + (B_last W)^T E               state after the chunk

Backward has the gradient dS' of the state after the chunk, and computes:

    U    = (B * K Q^T)^T dY + B_last K dS'         gradients of rate_j E_j
    dV   = (I + L)^-T (rate U)                     delta rule; otherwise rate U
    dS   = c_last dS' + (c Q)^T dY - (c K)^T dV    the last term only for the delta rule
    A    = B * dY E^T,  N = B * dV E^T for j < i   N is 0 without the delta rule
    dQ   = A W + c dY S^T
    dR   = -(N W + c dV S^T)                       gradients of K where it reads the state
    dW   = A^T Q - N^T K + B_last E dS'^T
    dK   = dR + rate dW
    drate_j  = k_j·dW_j
    dg_i     = q_i·dQ_i + k_i·dR_i - w_i·dW_i      and at the last token what c_last and B_last depend on

The gradient of a token's decay is the sum of dg over it and the later tokens of the chunk. dg has such a
short form because g occurs only in products with q, k and w.

Only S and dS' go from chunk to chunk: `states_kernel` and `state_gradients_kernel` loop over chunks, for a
block of a head's value elements. In the other kernels, a program has one chunk. Sums are not atomic, so the
results are the same in every run.

Legend: b samples, g key heads, n value heads, r = n/g, s tokens, d key size, e value size, m chunks.
Constants of a compiled kernel: C tokens of a chunk; D, d rounded up to a power of two; K key and V value
elements in a block; PRECISION of GEMMs in fp32. Elements outside of a tensor are loaded as zeros.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _key_head(x, strides, sample, head, r):
    """Return the address of a value head's queries or keys in ``[b, g, s, d]``; strides of b, g and s."""
    return x + tl.cast(sample, tl.int64) * strides[0] + tl.cast(head // r, tl.int64) * strides[1]


@triton.jit
def _value_head(x, strides, sample, head, r):
    """Return the address of a head of ``[b, g, r, s, e]``; strides of b, g, r and s."""
    group, member = tl.cast(head // r, tl.int64), tl.cast(head % r, tl.int64)
    return x + tl.cast(sample, tl.int64) * strides[0] + group * strides[1] + member * strides[2]


@triton.jit
def _addresses(x, stride, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    x += tl.cast(row, tl.int64) * stride + column  # only offsets within the block fit into 32 bits
    return x + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _mask(row, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return (row + tl.arange(0, ROWS) < rows)[:, None] & (column + tl.arange(0, COLUMNS) < columns)[None, :]


@triton.jit
def _load(x, stride, row, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a block of a matrix ``[rows, columns]``."""
    mask = _mask(row, rows, column, columns, ROWS, COLUMNS)
    return tl.load(_addresses(x, stride, row, column, ROWS, COLUMNS), mask=mask, other=0.0)


@triton.jit
def _store(x, stride, row, rows, column, columns, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a block of a matrix ``[rows, columns]``, rounded."""
    mask = _mask(row, rows, column, columns, ROWS, COLUMNS)
    places = _addresses(x, stride, row, column, ROWS, COLUMNS)
    tl.store(places, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _numbers(x, head, first, s, C: tl.constexpr):
    """Load a number for each token of a chunk, ``[C]``, from a head of ``[b n, s]``."""
    rows = first + tl.arange(0, C)
    return tl.load(x + head * s + rows, mask=rows < s, other=0.0)


@triton.jit
def _document_starts(starts, sample, first, s, C: tl.constexpr):
    """Return the first token of each token's document, ``[C]``; -1 without documents."""
    rows = first + tl.arange(0, C)
    if starts is None:
        found = tl.full([C], -1, tl.int32)
    else:
        found = tl.load(starts + sample.to(tl.int64) * s + rows, mask=rows < s, other=0).to(tl.int32)
    return found


@triton.jit
def _last_start(starts, sample, first, s, C: tl.constexpr):
    """Return the first token of the document of a chunk's last token; -1 without documents."""
    if starts is None:
        found = -1
    else:
        last = tl.minimum(first + C, s) - 1
        found = tl.load(starts + sample.to(tl.int64) * s + last).to(tl.int32)
    return found


@triton.jit
def _between(sums, document_starts, first, STRICT: tl.constexpr, C: tl.constexpr):
    """Return B, ``[C, C]``; with `STRICT`, a token does not see itself."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    seen = (j < i if STRICT else j <= i) & (first + j >= document_starts[:, None])
    # Masked before exp: after it, the factors of later tokens could be infinite.
    return tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _since_start(sums, document_starts, first):
    """Return c, ``[C]``."""
    return tl.where(document_starts < first, tl.exp(sums), 0.0)


@triton.jit
def _to_end(decays, sums, last_start, first, C: tl.constexpr):
    """Return the last row of B, ``[C]``, and the last element of c."""
    total = tl.sum(decays, 0)
    to_end = tl.where(first + tl.arange(0, C) >= last_start, tl.exp(total - sums), 0.0)
    return to_end, tl.where(last_start < first, tl.exp(total), 0.0)


@triton.jit
def _dot(x, y, PRECISION: tl.constexpr):
    """Multiply in the first matrix's precision, and sum in fp32."""
    return tl.dot(x, y.to(x.dtype), input_precision=PRECISION)


@triton.jit
def _written(keys, rates):
    """Return w from the keys, ``[C, K]``, rounded like them: all kernels must use the same numbers."""
    return (keys * rates[:, None]).to(keys.dtype)


@triton.jit
def inverses_kernel(
    k, decay, rate, starts, inverses, k_strides, n, r, s,
    d: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute (I + L)^-1 of a chunk, ``[b, n, m, C, C]``; grid (m, n, b).

    The inverses of the diagonal blocks of 1, 2, 4, … tokens are joined in pairs. Each result is a forward
    substitution by blocks. A series of powers of L would be a shorter chain, but the powers can be huge.
    """
    chunk, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, place = chunk * C, sample.to(tl.int64) * n + head
    keys = _load(_key_head(k, k_strides, sample, head, r), k_strides[2], first, s, 0, d, C, D)
    rates = _numbers(rate, place, first, s, C)
    sums = tl.cumsum(_numbers(decay, place, first, s, C), 0)
    between = _between(sums, _document_starts(starts, sample, first, s, C), first, True, C)
    lower = _dot(keys, tl.trans(_written(keys, rates)), PRECISION) * between
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (j < i), -lower, 0.0))
    size = 2
    while size < C:
        is_joined = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
        joined = _dot(inverse, tl.where(is_joined, lower, 0.0), PRECISION)
        inverse -= _dot(joined, inverse, PRECISION)
        size *= 2
    _store(inverses + (place * tl.num_programs(0) + chunk) * C * C, C, 0, C, 0, C, inverse, C, C)


@triton.jit
def states_kernel(
    k, v, decay, rate, starts, inverses, state, errors, states, last, k_strides, v_strides, errors_strides,
    n, r, s, d: tl.constexpr, e: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute the states before all chunks, the last state, and E; grid (e/V, n, b).

    States are ``[b, n, m, d, e]``, the first and the last one ``[b, n, d, e]``, and E ``[b, n, s, e]``.
    Without the delta rule, `inverses` and `errors` are None.
    """
    column, head, sample = tl.program_id(0) * V, tl.program_id(1), tl.program_id(2)
    place = sample.to(tl.int64) * n + head
    k_head, v_head = _key_head(k, k_strides, sample, head, r), _value_head(v, v_strides, sample, head, r)
    states += place * tl.cdiv(s, C) * d * e
    current = tl.zeros([D, V], tl.float32)
    if state is not None:
        current += _load(state + place * d * e, e, 0, d, column, e, D, V)
    for first in range(0, s, C):
        _store(states, e, 0, d, column, e, current, D, V)
        states += d * e
        keys = _load(k_head, k_strides[2], first, s, 0, d, C, D)
        written = _load(v_head, v_strides[3], first, s, column, e, C, V)
        decays, rates = _numbers(decay, place, first, s, C), _numbers(rate, place, first, s, C)
        sums = tl.cumsum(decays, 0)
        to_end, kept = _to_end(decays, sums, _last_start(starts, sample, first, s, C), first, C)
        if inverses is not None:
            since = _since_start(sums, _document_starts(starts, sample, first, s, C), first)
            missing = written - since[:, None] * _dot(keys, current, PRECISION)
            inverse = _load(inverses + (place * tl.cdiv(s, C) + first // C) * C * C, C, 0, C, 0, C, C, C)
            written = _dot(inverse, missing, PRECISION).to(written.dtype)
            errors_head = _value_head(errors, errors_strides, sample, head, r)
            _store(errors_head, errors_strides[3], first, s, column, e, written, C, V)
        added = _dot(tl.trans(_written(keys, rates)), written * to_end[:, None], PRECISION)
        current = current * kept + added
    _store(last + place * d * e, e, 0, d, column, e, current, D, V)


@triton.jit
def outputs_kernel(
    q, k, errors, decay, rate, starts, states, out, q_strides, k_strides, errors_strides, out_strides,
    n, r, s, d: tl.constexpr, e: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute Y ``[b, n, s, e]`` of a chunk; grid (m, n, b)."""
    chunk, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, place = chunk * C, sample.to(tl.int64) * n + head
    queries = _load(_key_head(q, q_strides, sample, head, r), q_strides[2], first, s, 0, d, C, D)
    keys = _load(_key_head(k, k_strides, sample, head, r), k_strides[2], first, s, 0, d, C, D)
    sums = tl.cumsum(_numbers(decay, place, first, s, C), 0)
    document_starts = _document_starts(starts, sample, first, s, C)
    since = _since_start(sums, document_starts, first)
    written = _written(keys, _numbers(rate, place, first, s, C))
    scores = _dot(queries, tl.trans(written), PRECISION) * _between(sums, document_starts, first, False, C)
    scores = scores.to(queries.dtype)
    errors_head = _value_head(errors, errors_strides, sample, head, r)
    out_head = _value_head(out, out_strides, sample, head, r)
    states += (place * tl.num_programs(0) + chunk) * d * e
    for column in range(0, e, V):
        values = _load(errors_head, errors_strides[3], first, s, column, e, C, V)
        state = _load(states, e, 0, d, column, e, D, V)
        y = _dot(scores, values, PRECISION) + since[:, None] * _dot(queries, state, PRECISION)
        _store(out_head, out_strides[3], first, s, column, e, y, C, V)


@triton.jit
def chunk_gradients_kernel(
    q, k, grad, decay, starts, grad_changes, q_strides, k_strides, grad_strides,
    n, r, s, d: tl.constexpr, e: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute what the outputs of a chunk add to U, ``[b, n, s, e]``; grid (m, n, b)."""
    chunk, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, place = chunk * C, sample.to(tl.int64) * n + head
    queries = _load(_key_head(q, q_strides, sample, head, r), q_strides[2], first, s, 0, d, C, D)
    keys = _load(_key_head(k, k_strides, sample, head, r), k_strides[2], first, s, 0, d, C, D)
    sums = tl.cumsum(_numbers(decay, place, first, s, C), 0)
    between = _between(sums, _document_starts(starts, sample, first, s, C), first, False, C)
    scores = (_dot(queries, tl.trans(keys), PRECISION) * between).to(queries.dtype)
    grad_head = _value_head(grad, grad_strides, sample, head, r)
    for column in range(0, e, V):
        grads = _load(grad_head, grad_strides[3], first, s, column, e, C, V)
        grad_block = _dot(tl.trans(scores), grads, PRECISION)
        _store(grad_changes + place * s * e, e, first, s, column, e, grad_block, C, V)


@triton.jit
def state_gradients_kernel(
    q, k, grad, decay, rate, starts, inverses, grad_changes, grad_last, grad_v, grad_states, grad_state,
    q_strides, k_strides, grad_strides, grad_v_strides,
    n, r, s, d: tl.constexpr, e: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute dS' of all chunks, dS of the first one, and dV; grid (e/V, n, b).

    dS' is ``[b, n, m, d, e]``, dS ``[b, n, d, e]``. `grad_changes` is what `chunk_gradients_kernel` computed.
    """
    column, head, sample = tl.program_id(0) * V, tl.program_id(1), tl.program_id(2)
    place = sample.to(tl.int64) * n + head
    q_head, k_head = _key_head(q, q_strides, sample, head, r), _key_head(k, k_strides, sample, head, r)
    grad_head = _value_head(grad, grad_strides, sample, head, r)
    grad_v_head = _value_head(grad_v, grad_v_strides, sample, head, r)
    num_chunks = tl.cdiv(s, C)
    current = tl.zeros([D, V], tl.float32)
    if grad_last is not None:
        current += _load(grad_last + place * d * e, e, 0, d, column, e, D, V)
    for step in range(0, num_chunks):
        chunk = num_chunks - 1 - step
        first = chunk * C
        _store(grad_states + (place * num_chunks + chunk) * d * e, e, 0, d, column, e, current, D, V)
        queries = _load(q_head, q_strides[2], first, s, 0, d, C, D)
        keys = _load(k_head, k_strides[2], first, s, 0, d, C, D)
        grads = _load(grad_head, grad_strides[3], first, s, column, e, C, V)
        decays, rates = _numbers(decay, place, first, s, C), _numbers(rate, place, first, s, C)
        sums = tl.cumsum(decays, 0)
        since = _since_start(sums, _document_starts(starts, sample, first, s, C), first)
        to_end, kept = _to_end(decays, sums, _last_start(starts, sample, first, s, C), first, C)
        grad_block = _load(grad_changes + place * s * e, e, first, s, column, e, C, V)
        grad_block += to_end[:, None] * _dot(keys, current, PRECISION)
        grad_values = (grad_block * rates[:, None]).to(keys.dtype)
        if inverses is not None:
            inverse = _load(inverses + (place * num_chunks + chunk) * C * C, C, 0, C, 0, C, C, C)
            grad_values = _dot(tl.trans(inverse), grad_values, PRECISION).to(keys.dtype)
        _store(grad_v_head, grad_v_strides[3], first, s, column, e, grad_values, C, V)
        current = current * kept + _dot(tl.trans(queries), grads * since[:, None], PRECISION)
        if inverses is not None:
            current -= _dot(tl.trans(keys), grad_values * since[:, None], PRECISION)
    _store(grad_state + place * d * e, e, 0, d, column, e, current, D, V)


@triton.jit
def _values_and_gradients(
    heads, strides, first, s, column, e, IS_DELTA: tl.constexpr, C: tl.constexpr, V: tl.constexpr
):
    """Load a block of E, dY and dV, ``[C, V]``; E again for dV without the delta rule."""
    values = _load(heads[0], strides[0], first, s, column, e, C, V)
    grads = _load(heads[1], strides[1], first, s, column, e, C, V).to(values.dtype)
    grad_values = values
    if IS_DELTA:
        grad_values = _load(heads[2], strides[2], first, s, column, e, C, V)
    return values, grads, grad_values


@triton.jit
def _pair_gradients(
    heads, strides, first, s, e: tl.constexpr, IS_DELTA: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return dY E^T and dV E^T of a chunk, ``[C, C]``; zeros for the second one without the delta rule."""
    grad_scores, grad_lower = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for column in range(0, e, V):
        values, grads, grad_values = _values_and_gradients(
            heads, strides, first, s, column, e, IS_DELTA, C, V
        )
        grad_scores += _dot(grads, tl.trans(values), PRECISION)
        if IS_DELTA:
            grad_lower += _dot(grad_values, tl.trans(values), PRECISION)
    return grad_scores, grad_lower


@triton.jit
def _products_with_states(
    states, grad_states, heads, strides, row, first, s, d: tl.constexpr, e: tl.constexpr,
    IS_DELTA: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return dY S^T, -dV S^T and E dS'^T for a block of keys, ``[C, K]``, and sums of S * dS', ``[V]``."""
    grad_queries, grad_reads = tl.zeros([C, K], tl.float32), tl.zeros([C, K], tl.float32)
    grad_written, grad_factor = tl.zeros([C, K], tl.float32), tl.zeros([V], tl.float32)
    for column in range(0, e, V):
        state = _load(states, e, row, d, column, e, K, V)
        grad_state = _load(grad_states, e, row, d, column, e, K, V)
        values, grads, grad_values = _values_and_gradients(
            heads, strides, first, s, column, e, IS_DELTA, C, V
        )
        grad_queries += _dot(grads, tl.trans(state), PRECISION)
        grad_written += _dot(values, tl.trans(grad_state), PRECISION)
        if IS_DELTA:
            grad_reads -= _dot(grad_values, tl.trans(state), PRECISION)
        grad_factor += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 0)
    return grad_queries, grad_reads, grad_written, grad_factor


@triton.jit
def input_gradients_kernel(
    q, k, errors, grad, grad_v, decay, rate, starts, states, grad_states,
    grad_q, grad_k, grad_decay, grad_rate,
    q_strides, k_strides, errors_strides, grad_strides, grad_v_strides, grad_k_strides,
    n, r, s, d: tl.constexpr, e: tl.constexpr, IS_DELTA: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute dQ and dK ``[b, n, s, d]``, and the gradients of decays and rates, of a chunk; grid (m, n, b).

    dQ and dK are per value head; heads that share queries and keys are summed elsewhere.
    """
    chunk, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, place = chunk * C, sample.to(tl.int64) * n + head
    q_head, k_head = _key_head(q, q_strides, sample, head, r), _key_head(k, k_strides, sample, head, r)
    errors_head = _value_head(errors, errors_strides, sample, head, r)
    grad_head = _value_head(grad, grad_strides, sample, head, r)
    grad_v_head = _value_head(grad_v, grad_v_strides, sample, head, r)
    grad_q_head = _value_head(grad_q, grad_k_strides, sample, head, r)
    grad_k_head = _value_head(grad_k, grad_k_strides, sample, head, r)
    states += (place * tl.num_programs(0) + chunk) * d * e
    grad_states += (place * tl.num_programs(0) + chunk) * d * e
    decays, rates = _numbers(decay, place, first, s, C), _numbers(rate, place, first, s, C)
    sums = tl.cumsum(decays, 0)
    document_starts = _document_starts(starts, sample, first, s, C)
    since = _since_start(sums, document_starts, first)
    to_end, kept = _to_end(decays, sums, _last_start(starts, sample, first, s, C), first, C)

    heads = errors_head, grad_head, grad_v_head
    strides = errors_strides[3], grad_strides[3], grad_v_strides[3]
    grad_scores, grad_lower = _pair_gradients(heads, strides, first, s, e, IS_DELTA, PRECISION, C, V)
    grad_scores = (grad_scores * _between(sums, document_starts, first, False, C)).to(q.dtype.element_ty)
    grad_lower = (grad_lower * _between(sums, document_starts, first, True, C)).to(q.dtype.element_ty)

    grad_sums, grad_rates = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    grad_ends, grad_kept = tl.zeros([C], tl.float32), tl.zeros([V], tl.float32)
    for row in range(0, d, K):
        queries = _load(q_head, q_strides[2], first, s, row, d, C, K)
        keys = _load(k_head, k_strides[2], first, s, row, d, C, K)
        written = _written(keys, rates)
        grad_queries, grad_reads, grad_written, grad_factor = _products_with_states(
            states, grad_states, heads, strides, row, first, s, d, e, IS_DELTA, PRECISION, C, K, V
        )
        grad_kept += grad_factor
        grad_queries = grad_queries * since[:, None] + _dot(grad_scores, written, PRECISION)
        grad_written *= to_end[:, None]
        grad_ends += tl.sum(written * grad_written, 1)
        grad_written += _dot(tl.trans(grad_scores), queries, PRECISION)
        if IS_DELTA:
            grad_reads = grad_reads * since[:, None] - _dot(grad_lower, written, PRECISION)
            grad_written -= _dot(tl.trans(grad_lower), keys, PRECISION)
        grad_rates += tl.sum(keys * grad_written, 1)
        grad_sums += tl.sum(queries * grad_queries + keys * grad_reads - written * grad_written, 1)
        grad_keys = grad_reads + grad_written * rates[:, None]
        _store(grad_q_head, grad_k_strides[3], first, s, row, d, grad_queries, C, K)
        _store(grad_k_head, grad_k_strides[3], first, s, row, d, grad_keys, C, K)
    grad_end = tl.sum(grad_ends, 0) + kept * tl.sum(grad_kept, 0)
    rows = first + tl.arange(0, C)
    tl.store(grad_decay + place * s + rows, tl.cumsum(grad_sums, 0, reverse=True) + grad_end, mask=rows < s)
    tl.store(grad_rate + place * s + rows, grad_rates, mask=rows < s)
