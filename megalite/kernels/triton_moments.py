"""Round Adam's moments in Triton, to the same bits as `megalite.kernels.moments`."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "key", "base", "first", "run_length", "run_stride"])
def round_moments_kernel(
    exp_avg, exp_avg_sq, rounded, rounded_sq, number,
    n: tl.int64, key: tl.int64, base: tl.int64, first: tl.int64, run_length: tl.int64, run_stride: tl.int64,
    IS_E4M3: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Round a block of N elements; grid (n/N).

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
