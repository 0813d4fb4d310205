"""Copy tokens to the rows of their experts in Triton, and sum each token's rows.

A program has one token and N of its features. It reads the token once and writes its rows, or reads its rows
and writes their sum once. `megalite.kernels.token_rows` describes the arguments. Sums are in the order of
the token's rows and not atomic, so they are the same in every run.

Constants of a compiled kernel: K, the largest number of rows of a token; N.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _rows_of_token(starts, num_tokens, num_rows, K: tl.constexpr):
    """Return the first of the program's token's rows in the order of the tokens, and their number."""
    token = tl.program_id(0).to(tl.int64)
    if starts is None:
        first, count = token * K, tl.full([], K, tl.int32)
    else:
        first = tl.load(starts + token)
        end = tl.load(starts + token + 1, mask=token + 1 < num_tokens, other=num_rows)
        count = (end - first).to(tl.int32)
    return first, count


@triton.jit
def copy_kernel(x, out, places, starts, num_tokens, num_rows, width, K: tl.constexpr, N: tl.constexpr):
    """Copy tokens ``[t, width]`` to their rows ``[n, width]``; grid (t, width/N)."""
    first, count = _rows_of_token(starts, num_tokens, num_rows, K)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    in_row = columns < width
    counts = tl.where(in_row, count, 0)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * width + columns, mask=in_row)
    for i in tl.static_range(K):
        row = tl.load(places + first + i, mask=count > i, other=0)
        tl.store(out + row * width + columns, values, mask=counts > i)


@triton.jit
def sum_kernel(rows, out, places, starts, num_tokens, num_rows, width, K: tl.constexpr, N: tl.constexpr):
    """Sum each token's rows of ``[n, width]`` to ``[t, width]``; grid (t, width/N)."""
    first, count = _rows_of_token(starts, num_tokens, num_rows, K)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    in_row = columns < width
    counts = tl.where(in_row, count, 0)
    is_double: tl.constexpr = rows.dtype.element_ty == tl.float64
    WIDE: tl.constexpr = tl.float64 if is_double else tl.float32
    total = tl.zeros([N], WIDE)
    for i in tl.static_range(K):
        row = tl.load(places + first + i, mask=count > i, other=0)
        total += tl.load(rows + row * width + columns, mask=counts > i, other=0.0).to(WIDE)
    token = out + tl.program_id(0).to(tl.int64) * width
    tl.store(token + columns, total.to(out.dtype.element_ty), mask=in_row)
