"""Compute attention in Triton without storing scores (Dao et al. 2022, Dao 2023).

Query i attends to the keys from start_i, the first token of its document, to i. In bidirectional attention it
attends to the last token of its document: `starts` and `ends` are then set. D_ij is 0 or 1 / (1 - p), from
the dropout counter. For one head:

    y_ij    = scale q_i·k_j                        with a cap c: c tanh(scale q_i·k_j / c)
    x_ij    = y_ij + slope (j - i)
    L_i     = log sum_j exp(x_ij)                  saved for backward
    P_ij    = exp(x_ij - L_i)
    o_i     = sum_j P_ij D_ij v_j

    delta_i = do_i·o_i                             = sum_j P_ij D_ij do_i·v_j
    dx_ij   = P_ij (D_ij do_i·v_j - delta_i)
    dv_j    = sum_i P_ij D_ij do_i
    dk_j    = scale sum_i dx_ij q_i
    dq_i    = scale sum_j dx_ij k_j

With a cap, 1 - (y_ij / c)^2 multiplies dx_ij in dk and dq.

Backward computes P and D again. In the kernel for dk and dv, a program has a block of keys and loops over
queries. In the kernel for dq, it has a block of queries and loops over keys. Sums are not atomic, so the
results are the same in every run.

The queries are those of a whole sequence if `start` is None, or `num_queries` of them from position `start`
on. `row` and `rows` count the m queries; `first` and `queries` are positions. The keys are those of the
sequence if `key_start` is None, or `num_keys` of them from this position on. `column` counts the e keys;
`first_key` and `keys` are positions. Queries that see none of these keys have an output of 0, and an L of
-inf. In backward, L, o and delta are those of attention with all keys.

Legend: b samples, n query heads, g key/value heads, r = n/g, s sequence, d head size. Constants of a compiled
kernel: M queries and N keys in a block; D, d rounded up to a power of two; ALIGNED, whether the index of each
query's first weight is divisible by 4; PRECISION of GEMMs in fp32. `factor` is 1 / (1 - p). Elements outside
of a tensor are loaded as zeros. Exponentials and logarithms have base 2, like the GPU's instructions; L in
memory has base e.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from megalite.kernels.triton_random import kept_elements

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _position(row, start):
    """Return the position of a query, or of a key."""
    return row if start is None else start + row


@triton.jit
def _row(position, start, m):
    """Return the row of the query (or the column of the key) at a position, or the nearest one up to m."""
    return position if start is None else tl.minimum(tl.maximum(position - start, 0), m)


@triton.jit
def _head(x, strides, sample, head):
    """Return the address of a head of ``[b, n, s, d]``; `strides` has the strides of b, n and s."""
    return x + tl.cast(sample, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _row_addresses(x, stride, first, ROWS: tl.constexpr, D: tl.constexpr):
    x += tl.cast(first, tl.int64) * stride  # only offsets within the block fit into 32 bits
    return x + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, D)[None, :]


@triton.jit
def _row_mask(first, s, d: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    mask = (first + tl.arange(0, ROWS) < s)[:, None]
    if d != D:
        mask &= (tl.arange(0, D) < d)[None, :]
    return mask


@triton.jit
def _load_rows(x, stride, first, s, d: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Load rows ``[ROWS, D]`` of a head ``[s, d]``."""
    mask = _row_mask(first, s, d, ROWS, D)
    return tl.load(_row_addresses(x, stride, first, ROWS, D), mask=mask, other=0.0)


@triton.jit
def _store_rows(x, stride, first, s, values, d: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Store rows ``[ROWS, D]`` of a head ``[s, d]``, rounded."""
    mask = _row_mask(first, s, d, ROWS, D)
    tl.store(_row_addresses(x, stride, first, ROWS, D), values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _tanh(x):
    """Return tanh(x), with an error of 1e-7 around 0 too; infinite exponentials are no problem."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def _scores(products, queries, keys, scale, cap, slopes, head):
    """Return x in base 2 from ``q·k``; `queries` and `keys` are positions that broadcast to this shape."""
    x = products * (scale * LOG2_E)
    if cap is not None:
        x = _tanh(products * (scale / cap)) * (cap * LOG2_E)
    if slopes is not None:
        slope = tl.load(slopes + head).to(tl.float32)
        x += slope * LOG2_E * (keys - queries).to(tl.float32)
    return x


@triton.jit
def _uncapped(dx, products, scale, cap):
    """Return the gradient of the scaled ``q·k`` from the gradient of x."""
    if cap is not None:
        y = _tanh(products * (scale / cap))
        dx *= 1.0 - y * y
    return dx


@triton.jit
def _first_keys(starts, sample, first, s, M: tl.constexpr):
    """Return the first key of each query of a block, ``[M]``; 0 without documents."""
    queries = first + tl.arange(0, M)
    if starts is None:
        first_keys = tl.zeros([M], tl.int32)
    else:
        places = starts + sample.to(tl.int64) * s + queries
        first_keys = tl.load(places, mask=queries < s, other=0).to(tl.int32)
    return first_keys


@triton.jit
def _end_keys(ends, sample, first, s, key_start, e, M: tl.constexpr):
    """Return the position after the last visible key of each query of a block, ``[M]``, among e keys."""
    queries = first + tl.arange(0, M)
    if ends is None:
        end_keys = queries + 1
    else:
        places = ends + sample.to(tl.int64) * s + queries
        end_keys = tl.load(places, mask=queries < s, other=0).to(tl.int32)
    if key_start is not None:
        end_keys = tl.minimum(end_keys, key_start + e)
    return end_keys


@triton.jit
def _key_ranges(starts, ends, sample, first, s, key_start, e, M: tl.constexpr, N: tl.constexpr):
    """Return the columns of keys that a block of queries attends to, and from where on it needs a mask."""
    if starts is None:
        begin, full_end = 0, _row(first + 1, key_start, e) // N * N
    else:
        begin = tl.load(starts + sample.to(tl.int64) * s + first).to(tl.int32)
        begin = _row(begin, key_start, e) // N * N
        full_end = begin
    end = tl.minimum(first + M, s)
    if ends is not None:
        end = tl.load(ends + sample.to(tl.int64) * s + end - 1).to(tl.int32)
    return begin, full_end, _row(end, key_start, e)


@triton.jit
def _row_ranges(
    starts, ends, query_ends, sample, first_key, s, m, start, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Return the range of rows that attend to a block of keys, and from where on they need no mask."""
    if query_ends is None:
        all_see = _row(first_key + N - 1, start, m)
        full_begin, end = tl.minimum(tl.cdiv(all_see, M) * M, m), m
    else:
        last_key = tl.minimum(first_key + N, s) - 1
        end = tl.load(query_ends + sample.to(tl.int64) * s + last_key).to(tl.int32)
        end = _row(end, start, m)
        full_begin = end
    begin = first_key
    if ends is not None:
        begin = tl.load(starts + sample.to(tl.int64) * s + first_key).to(tl.int32)
    return _row(begin, start, m) // M * M, full_begin, end


@triton.jit
def _kept(
    first, first_key, s, key, base, samples, sample, head, threshold,
    M: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return which weights of a block dropout keeps, ``[M, N]``, as in `megalite.kernels.dropout`.

    Weight (i, j) of a head has the index e = base + (head s + i) s + j. Its random number is word e % 4 of
    the Philox block with the counter (e // 4, the sample's number).
    """
    rows = base + (tl.cast(head, tl.int64) * s + first + tl.arange(0, M)) * s  # [M], index of weight (i, 0)
    return kept_elements(rows, first_key, tl.load(samples + sample), key, threshold, M, N, ALIGNED)


@triton.jit(do_not_specialize=["key", "base", "threshold"])
def forward_kernel(
    q, k, v, out, log_sums, slopes, starts, ends, samples, q_strides, k_strides, v_strides, out_strides,
    n, r, s, num_queries, start, num_keys, key_start, scale, cap,
    key: tl.int64, base: tl.int64, threshold: tl.uint32, factor,
    d: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute o ``[b, n, m, d]`` and L ``[b, n, m]`` of a block of queries; grid (m/M, n, b)."""
    m, e = s if start is None else num_queries, s if key_start is None else num_keys
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # start the blocks with the most keys first
    head, sample = tl.program_id(1), tl.program_id(2)
    row = block * M
    first = _position(row, start)
    queries = (first + tl.arange(0, M))[:, None]
    k_head, v_head = _head(k, k_strides, sample, head // r), _head(v, v_strides, sample, head // r)
    q_block = _load_rows(_head(q, q_strides, sample, head), q_strides[2], row, m, d, M, D)
    first_keys = _first_keys(starts, sample, first, s, M)
    end_keys = _end_keys(ends, sample, first, s, key_start, e, M)
    begin, full_end, end = _key_ranges(starts, ends, sample, first, s, key_start, e, M, N)
    largest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for masked in tl.static_range(0 if starts is None else 1, 2):
        for column in range(full_end if masked else begin, end if masked else full_end, N):
            first_key = _position(column, key_start)
            keys = (first_key + tl.arange(0, N))[None, :]
            k_block = _load_rows(k_head, k_strides[2], column, e, d, N, D)
            products = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
            x = _scores(products, queries, keys, scale, cap, slopes, head)  # [M, N]
            if masked:
                x = tl.where((keys < end_keys[:, None]) & (keys >= first_keys[:, None]), x, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(x, 1))
            shift = new_largest
            # A query has no key yet if its document starts after these keys, or no key of the others.
            if starts is not None or key_start is not None:
                shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            p, correction = tl.exp2(x - shift[:, None]), tl.exp2(largest - shift)
            total, largest = total * correction + tl.sum(p, 1), new_largest
            if samples is not None:
                kept = _kept(first, first_key, s, key, base, samples, sample, head, threshold, M, N, ALIGNED)
                p = tl.where(kept, p, 0.0)
            v_block = _load_rows(v_head, v_strides[2], column, e, d, N, D)
            acc = tl.dot(p.to(v_block.dtype), v_block, acc * correction[:, None], input_precision=PRECISION)
    if key_start is not None:
        total = tl.where(largest == float("-inf"), 1.0, total)  # of no key: 0 / 1 and -inf + log 1
    acc = acc * (factor / total)[:, None]
    _store_rows(_head(out, out_strides, sample, head), out_strides[2], row, m, acc, d, M, D)
    rows = row + tl.arange(0, M)
    places = log_sums + (sample.to(tl.int64) * n + head) * m + rows
    tl.store(places, (largest + tl.log2(total)) * LN_2, mask=rows < m)


@triton.jit
def delta_kernel(
    out, grad, delta, out_strides, grad_strides, n, m, d: tl.constexpr, M: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Compute delta ``[b, n, m]`` of a block of queries from o and do; grid (m/M, n, b)."""
    row, head, sample = tl.program_id(0) * M, tl.program_id(1), tl.program_id(2)
    o = _load_rows(_head(out, out_strides, sample, head), out_strides[2], row, m, d, M, D)
    do = _load_rows(_head(grad, grad_strides, sample, head), grad_strides[2], row, m, d, M, D)
    rows = row + tl.arange(0, M)
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + (sample.to(tl.int64) * n + head) * m + rows, sums, mask=rows < m)


@triton.jit(do_not_specialize=["key", "base", "threshold"])
def key_gradients_kernel(
    q, k, v, grad, grad_k, grad_v, log_sums, delta, slopes, starts, ends, query_ends, samples,
    q_strides, k_strides, v_strides, grad_strides, grad_k_strides, grad_v_strides,
    n, r, s, num_queries, start, num_keys, key_start, scale, cap,
    key: tl.int64, base: tl.int64, threshold: tl.uint32, factor,
    d: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv ``[b, g, e, d]`` of a block of keys, over all r query heads; grid (e/N, g, b).

    One of `grad_k` and `grad_v` can be None. Only the other one is then computed.

    Scores are transposed, ``[N, M]``, so that P and dx are first factors of GEMMs and can stay in registers.
    """
    m, e = s if start is None else num_queries, s if key_start is None else num_keys
    column, group, sample = tl.program_id(0) * N, tl.program_id(1), tl.program_id(2)
    first_key = _position(column, key_start)
    keys = (first_key + tl.arange(0, N))[:, None]
    k_block = _load_rows(_head(k, k_strides, sample, group), k_strides[2], column, e, d, N, D)
    v_block = _load_rows(_head(v, v_strides, sample, group), v_strides[2], column, e, d, N, D)
    begin, full_begin, end = _row_ranges(starts, ends, query_ends, sample, first_key, s, m, start, M, N)
    sum_k, sum_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for head in range(group * r, group * r + r):
        q_head, grad_head = _head(q, q_strides, sample, head), _head(grad, grad_strides, sample, head)
        head_start = (sample.to(tl.int64) * n + head) * m
        for masked in tl.static_range(0 if query_ends is None else 1, 2):
            for row in range(begin if masked else full_begin, full_begin if masked else end, M):
                first, rows = _position(row, start), row + tl.arange(0, M)
                q_block = _load_rows(q_head, q_strides[2], row, m, d, M, D)
                log_sum = tl.load(log_sums + head_start + rows, mask=rows < m, other=float("inf")) * LOG2_E
                products = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
                queries = _position(rows, start)[None, :]
                x = _scores(products, queries, keys, scale, cap, slopes, head)  # [N, M]
                p = tl.exp2(x - log_sum[None, :])
                if masked:
                    seen = keys < _end_keys(ends, sample, first, s, key_start, e, M)[None, :]
                    if starts is not None:
                        seen &= keys >= _first_keys(starts, sample, first, s, M)[None, :]
                    p = tl.where(seen, p, 0.0)
                grad_block = _load_rows(grad_head, grad_strides[2], row, m, d, M, D)
                if samples is not None:
                    kept = tl.trans(
                        _kept(first, first_key, s, key, base, samples, sample, head, threshold, M, N, ALIGNED)
                    )
                if grad_v is not None:
                    kept_p = p if samples is None else tl.where(kept, p, 0.0)
                    sum_v = tl.dot(kept_p.to(grad_block.dtype), grad_block, sum_v, input_precision=PRECISION)
                if grad_k is not None:
                    weight_grads = tl.dot(v_block, tl.trans(grad_block), input_precision=PRECISION)
                    if samples is not None:
                        weight_grads = tl.where(kept, weight_grads * factor, 0.0)
                    deltas = tl.load(delta + head_start + rows, mask=rows < m, other=0.0)
                    dx = _uncapped(p * (weight_grads - deltas[None, :]), products, scale, cap)
                    sum_k = tl.dot(dx.to(q_block.dtype), q_block, sum_k, input_precision=PRECISION)
    if grad_k is not None:
        grad_k_head = _head(grad_k, grad_k_strides, sample, group)
        _store_rows(grad_k_head, grad_k_strides[2], column, e, sum_k * scale, d, N, D)
    if grad_v is not None:
        grad_v_head = _head(grad_v, grad_v_strides, sample, group)
        _store_rows(grad_v_head, grad_v_strides[2], column, e, sum_v * factor, d, N, D)


@triton.jit(do_not_specialize=["key", "base", "threshold"])
def query_gradients_kernel(
    q, k, v, grad, grad_q, log_sums, delta, slopes, starts, ends, samples,
    q_strides, k_strides, v_strides, grad_strides, grad_q_strides,
    n, r, s, num_queries, start, num_keys, key_start, scale, cap,
    key: tl.int64, base: tl.int64, threshold: tl.uint32, factor,
    d: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute dq ``[b, n, m, d]`` of a block of queries; grid (m/M, n, b)."""
    m, e = s if start is None else num_queries, s if key_start is None else num_keys
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # start the blocks with the most keys first
    first = _position(row, start)
    head, sample = tl.program_id(1), tl.program_id(2)
    rows = row + tl.arange(0, M)
    k_head, v_head = _head(k, k_strides, sample, head // r), _head(v, v_strides, sample, head // r)
    q_block = _load_rows(_head(q, q_strides, sample, head), q_strides[2], row, m, d, M, D)
    grad_block = _load_rows(_head(grad, grad_strides, sample, head), grad_strides[2], row, m, d, M, D)
    head_start = (sample.to(tl.int64) * n + head) * m
    log_sum = tl.load(log_sums + head_start + rows, mask=rows < m, other=float("inf")) * LOG2_E
    deltas = tl.load(delta + head_start + rows, mask=rows < m, other=0.0)
    first_keys = _first_keys(starts, sample, first, s, M)
    end_keys = _end_keys(ends, sample, first, s, key_start, e, M)
    begin, full_end, end = _key_ranges(starts, ends, sample, first, s, key_start, e, M, N)
    sum_q = tl.zeros([M, D], tl.float32)
    for masked in tl.static_range(0 if starts is None else 1, 2):
        for column in range(full_end if masked else begin, end if masked else full_end, N):
            first_key = _position(column, key_start)
            keys = (first_key + tl.arange(0, N))[None, :]
            k_block = _load_rows(k_head, k_strides[2], column, e, d, N, D)
            products = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
            x = _scores(products, _position(rows, start)[:, None], keys, scale, cap, slopes, head)  # [M, N]
            p = tl.exp2(x - log_sum[:, None])
            if masked:
                p = tl.where((keys < end_keys[:, None]) & (keys >= first_keys[:, None]), p, 0.0)
            v_block = _load_rows(v_head, v_strides[2], column, e, d, N, D)
            weight_grads = tl.dot(grad_block, tl.trans(v_block), input_precision=PRECISION)
            if samples is not None:
                kept = _kept(first, first_key, s, key, base, samples, sample, head, threshold, M, N, ALIGNED)
                weight_grads = tl.where(kept, weight_grads * factor, 0.0)
            dx = _uncapped(p * (weight_grads - deltas[:, None]), products, scale, cap)
            sum_q = tl.dot(dx.to(k_block.dtype), k_block, sum_q, input_precision=PRECISION)
    grad_q_head = _head(grad_q, grad_q_strides, sample, head)
    _store_rows(grad_q_head, grad_q_strides[2], row, m, sum_q * scale, d, M, D)
