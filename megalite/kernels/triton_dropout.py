"""Compute the mask of dropout in Triton, and residual + dropout(x + bias) and its gradients in one kernel.

The mask is bitwise the same as in `megalite.kernels.dropout`: element e of a sample uses word e % 4 of the
Philox block with the counter (e // 4, the sample's number).

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
