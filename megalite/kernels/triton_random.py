"""Kernels in Triton that draw random numbers: dropout, the softmax of attention with it, and rounded moments.

They are residual + dropout(x + bias) and its gradients, and the softmax in place, one row per program. Query
i of head h attends to the keys from the first of its document to i, or with `ends` to the last. Scores of
other keys have no effect, even if they are NaN.

The mask of dropout is bitwise the same as in `megalite.kernels.dropout`: element e of a sample uses
word e % 4 of the Philox block with the counter (e // 4, the sample's number).

Keys and indices are kernel arguments and not compile-time constants. Constants of a compiled kernel: M rows
and N columns of a block; ALIGNED, whether the index of each row's first element is divisible by 4; WIDE, the
type to compute with. `factor` is 1 / (1 - p); an element is kept if its word is at least `threshold`.
Elements outside of a tensor are loaded as zeros.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl


def wide_type(dtype):
    """Return the type to compute with, for tensors of a dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def kept_elements(
    rows, first_column, numbers, key, threshold, M: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return which elements of a block dropout keeps, ``[M, N]``.

    Element (i, j) has the index ``rows[i] + first_column + j`` within its sample. `numbers` is one sample
    number for all rows, or ``[M, 1]``.
    """
    number_low, number_high = numbers.to(tl.uint32), (numbers >> 32).to(tl.uint32)
    if ALIGNED:  # four neighbouring elements have the four words of a block
        blocks = (rows >> 2)[:, None] + (first_column // 4 + tl.arange(0, N // 4))[None, :]  # [M, N/4]
        low, high = blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(key, low, high, number_low, number_high)
        k0, k1, k2, k3 = w0 >= threshold, w1 >= threshold, w2 >= threshold, w3 >= threshold
        result = tl.join(tl.join(k0, k2), tl.join(k1, k3)).reshape(M, N)
    else:
        index = rows[:, None] + (first_column + tl.arange(0, N))[None, :]
        low, high = (index >> 2).to(tl.uint32), (index >> 34).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(key, low, high, number_low, number_high)
        even, odd = tl.where((index & 2) == 0, w0, w2), tl.where((index & 2) == 0, w1, w3)
        result = tl.where((index & 1) == 0, even, odd) >= threshold
    return result


@triton.jit(do_not_specialize=["key", "base", "stride", "threshold"])
def dropout_kernel(
    x, bias, residual, out, sums, samples, b, num_rows, width,
    key: tl.int64, base: tl.int64, stride: tl.int64, threshold: tl.uint32, factor: tl.float64,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute residual + dropout(x + bias) of a block of ``[outer b, width]``; grid (rows/M * width/N).

    Element (o, ..., r) of a sample has the index ``base + o * stride + r``. `bias` and `residual` can be
    None; without `samples` nothing is dropped. `sums` receives the sums of dropout(x) over the rows of each
    block, ``[rows/M, width]``; it can be None, and requires that `bias` is None.
    """
    num_column_blocks = tl.cdiv(width, N)
    row_block = tl.program_id(0) // num_column_blocks
    first_column = (tl.program_id(0) % num_column_blocks).to(tl.int64) * N
    rows, columns = row_block.to(tl.int64) * M + tl.arange(0, M), first_column + tl.arange(0, N)
    in_rows, in_columns = rows < num_rows, columns < width
    places, mask = rows[:, None] * width + columns[None, :], in_rows[:, None] & in_columns[None, :]
    values = tl.load(x + places, mask=mask, other=0.0).to(WIDE)
    if bias is not None:
        values += tl.load(bias + columns, mask=in_columns, other=0.0).to(WIDE)[None, :]
    if samples is not None:
        numbers = tl.load(samples + rows % b, mask=in_rows, other=0)[:, None]
        first = base + rows // b * stride
        is_kept = kept_elements(first, first_column, numbers, key, threshold, M, N, ALIGNED)
        values = tl.where(is_kept, values * tl.full([], factor, WIDE), 0.0)
    if sums is not None:
        tl.store(sums + row_block.to(tl.int64) * width + columns, tl.sum(values, 0), mask=in_columns)
    if residual is not None:
        values += tl.load(residual + places, mask=mask, other=0.0).to(WIDE)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=mask)


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
def softmax_kernel(
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
def softmax_backward_kernel(
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


@triton.jit(do_not_specialize=["n", "key", "base", "first", "run_length", "run_stride"])
def round_moments_kernel(
    exp_avg, exp_avg_sq, rounded, rounded_sq, number,
    n: tl.int64, key: tl.int64, base: tl.int64, first: tl.int64, run_length: tl.int64, run_stride: tl.int64,
    IS_E4M3: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Round Adam's moments, a block of N elements, to the bits of `megalite.kernels.moments`; grid (n/N).

    `rounded` is uint8 with IS_E4M3, otherwise int16, and `rounded_sq` int16: the bits of the moments. Each of
    them can be None.
    """
    element = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = element < n
    place = first + element
    run = place // run_length
    index = base + run * run_stride + (place - run * run_length)
    sample = tl.load(number).to(tl.int64) + tl.zeros([N], tl.int64)
    w0, w1, w2, w3 = tl.philox(
        key,
        (index >> 2).to(tl.uint32),
        (index >> 34).to(tl.uint32),
        sample.to(tl.uint32),
        (sample >> 32).to(tl.uint32),
    )
    even, odd = tl.where((index & 2) == 0, w0, w2), tl.where((index & 2) == 0, w1, w3)
    word = tl.where((index & 1) == 0, even, odd)
    square = tl.load(exp_avg_sq + element, mask=mask, other=0.0).to(tl.uint32, bitcast=True)
    if rounded_sq is not None:
        square = (square + (word & 0xFFFF)) >> 16
        tl.store(rounded_sq + element, square.to(tl.int16), mask=mask)
        square = square << 16
    if rounded is not None:
        mean = tl.load(exp_avg + element, mask=mask, other=0.0)
        if IS_E4M3:
            exponent = (((square >> 23).to(tl.int32) - 127) >> 1) - 3
            scaled = mean * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
            size = tl.minimum(tl.abs(scaled), 448.0)
            normal = size.to(tl.uint32, bitcast=True) - (120 << 23)
            small = (tl.where(size < 0.015625, size, 0.0) * 536870912.0).to(tl.int32).to(tl.uint32)
            magnitude = tl.where(size < 0.015625, small, normal)
            sign = (scaled.to(tl.uint32, bitcast=True) >> 24) & 0x80
            code = ((magnitude + ((word >> 16) << 4)) >> 20) | sign
            tl.store(rounded + element, code.to(tl.uint8), mask=mask)
        else:
            code = (mean.to(tl.uint32, bitcast=True) + (word >> 16)) >> 16
            tl.store(rounded + element, code.to(tl.int16), mask=mask)
