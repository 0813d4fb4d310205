"""Compute the softmax of attention in Triton, in place, for a block of queries; one row per program.

Query i of head h attends to the keys from the first of its document to i, or with `ends` to the last.
Arguments and constants are the same as in `triton_dropout`. Scores of other keys have no effect, even if they
are NaN.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from megalite.kernels.triton_dropout import kept_elements


@triton.jit
def _row(n, num_rows, num_keys, first, starts, ends, s):
    """Return the program's row in ``[b, n, rows]``, the offset of its keys, its query and its key range."""
    row, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = first + row
    begin, end = 0, query + 1
    if starts is not None:
        begin = tl.load(starts + sample.to(tl.int64) * s + query).to(tl.int32)
    if ends is not None:
        end = tl.minimum(tl.load(ends + sample.to(tl.int64) * s + query).to(tl.int32), num_keys)
    row = (sample.to(tl.int64) * n + head) * num_rows + row
    return row, row * num_keys, query, begin, end


@triton.jit
def _scores(row, keys, num_keys, query, begin, end, slopes, scale, WIDE: tl.constexpr):
    """Return a row's scaled scores with ALiBi (-inf for hidden keys), and which keys are visible."""
    seen = (keys >= begin) & (keys < end)
    x = tl.load(row + keys, mask=keys < num_keys, other=0.0).to(WIDE) * tl.full([], scale, WIDE)
    if slopes is not None:
        x += tl.load(slopes + tl.program_id(1)).to(WIDE) * (keys - query).to(WIDE)
    return tl.where(seen, x, float("-inf")), seen


@triton.jit
def _factors(
    query, first_key, s, samples, key, base, threshold, factor,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return dropout's factor of each weight, ``[N]``: 0 or 1 / (1 - p)."""
    first_weight = base + (tl.program_id(1).to(tl.int64) * s + query) * s
    rows = tl.full([1], 0, tl.int64) + first_weight
    number = tl.load(samples + tl.program_id(2))
    kept = kept_elements(rows, first_key, number, key, threshold, 1, N, ALIGNED).reshape(N)
    return tl.where(kept, tl.full([], factor, WIDE), 0.0)


@triton.jit(do_not_specialize=["first", "key", "base", "threshold"])
def forward_kernel(
    scores, log_sums, slopes, starts, ends, samples, n, num_rows, num_keys, first, s,
    scale: tl.float64, key: tl.int64, base: tl.int64, threshold: tl.uint32, factor: tl.float64,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Replace a row of scores ``[b, n, rows, keys]`` with weights; grid (rows, n, b)."""
    row, place, query, begin, end = _row(n, num_rows, num_keys, first, starts, ends, s)
    largest, total = tl.full([], float("-inf"), WIDE), tl.full([], 0.0, WIDE)
    for first_key in range(begin // N * N, end, N):
        keys = first_key + tl.arange(0, N)
        x, _ = _scores(scores + place, keys, num_keys, query, begin, end, slopes, scale, WIDE)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # scores may be -inf
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = new_largest
    tl.store(log_sums + row, largest + tl.log(total))
    for first_key in range(0, num_keys, N):
        keys = first_key + tl.arange(0, N)
        x, seen = _scores(scores + place, keys, num_keys, query, begin, end, slopes, scale, WIDE)
        weights = tl.where(seen, tl.exp(x - largest) / total, 0.0)
        if samples is not None:
            weights *= _factors(query, first_key, s, samples, key, base, threshold, factor, WIDE, ALIGNED, N)
        tl.store(scores + place + keys, weights.to(scores.dtype.element_ty), mask=keys < num_keys)


@triton.jit(do_not_specialize=["first", "key", "base", "threshold"])
def backward_kernel(
    scores, grad, log_sums, slopes, starts, ends, samples, n, num_rows, num_keys, first, s,
    scale: tl.float64, key: tl.int64, base: tl.int64, threshold: tl.uint32, factor: tl.float64,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Replace a row of scores with weights, and the weights' gradient with the gradient of unscaled scores.

    Grid (rows, n, b). With weights P, dropout's factors D and the gradient g of P D, the scores' gradient is
    scale P (g D - sum(P g D)).
    """
    row, place, query, begin, end = _row(n, num_rows, num_keys, first, starts, ends, s)
    log_sum, mean = tl.load(log_sums + row), tl.full([], 0.0, WIDE)
    for stores in tl.static_range(2):  # read all weights for the sum before overwriting the first one
        for first_key in range(0 if stores else begin // N * N, num_keys if stores else end, N):
            keys = first_key + tl.arange(0, N)
            x, seen = _scores(scores + place, keys, num_keys, query, begin, end, slopes, scale, WIDE)
            weights = tl.where(seen, tl.exp(x - log_sum), 0.0)
            g = tl.where(seen, tl.load(grad + place + keys, mask=keys < num_keys, other=0.0).to(WIDE), 0.0)
            dropped = weights
            if samples is not None:
                factors = _factors(
                    query, first_key, s, samples, key, base, threshold, factor, WIDE, ALIGNED, N
                )
                g, dropped = g * factors, weights * factors
            if stores:
                dx = weights * (g - mean) * tl.full([], scale, WIDE)
                tl.store(grad + place + keys, dx.to(grad.dtype.element_ty), mask=keys < num_keys)
                tl.store(scores + place + keys, dropped.to(scores.dtype.element_ty), mask=keys < num_keys)
            else:
                mean += tl.sum(weights * g, 0)
