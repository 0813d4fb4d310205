"""Implement Philox4x32-10, the counter-based generator of all random numbers, and fill weights with them.

A random number is a pure function of (key, sample, element): the key identifies the site (a parameter or a
dropout), the sample is its number in the run, and the element is its index in the *full* tensor. It does not
matter which rank computes the number, or in which order. `csrc/philox.h` has the same arithmetic in C++,
operation by operation. Both give the same bits, because they use only fp64 add, multiply and divide, which
IEEE 754 defines to the last bit. A rank therefore fills its shard of the initial weights without a full
tensor or a broadcast. Logarithm and square root are implemented here: torch's use MKL on some processors,
where even the square root is not correctly rounded.

Sources: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox);
Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37, 1988
(PPND16).
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.kernels.library import define, no_result

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# AS 241, lowest power first. Its third region (p < exp(-25)) is never reached: p is at least 2^-33.
_CENTRAL_NUM = (
    3.3871328727963666080e0,
    1.3314166789178437745e2,
    1.9715909503065514427e3,
    1.3731693765509461125e4,
    4.5921953931549871457e4,
    6.7265770927008700853e4,
    3.3430575583588128105e4,
    2.5090809287301226727e3,
)
_CENTRAL_DEN = (
    1.0,
    4.2313330701600911252e1,
    6.8718700749205790830e2,
    5.3941960214247511077e3,
    2.1213794301586595867e4,
    3.9307895800092710610e4,
    2.8729085735721942674e4,
    5.2264952788528545610e3,
)
_TAIL_NUM = (
    1.42343711074968357734e0,
    4.63033784615654529590e0,
    5.76949722146069140550e0,
    3.64784832476320460504e0,
    1.27045825245236838258e0,
    2.41780725177450611770e-1,
    2.27238449892691845833e-2,
    7.74545014278341407640e-4,
)
_TAIL_DEN = (
    1.0,
    2.05319162663775882187e0,
    1.67638483018380384940e0,
    6.89767334985100004550e-1,
    1.48103976427480074590e-1,
    1.51986665636164571966e-2,
    5.47593808499534494600e-4,
    1.05075007164441684324e-9,
)
_LN2 = 0.69314718055994530942
_INVERSE_SQRT_GUESS = 0x5FE6EB50C7B537A9  # this minus half the bits of x: 1 / sqrt(x), error at most 3.4%
_SQRT_HALF = 0.70710678118654752440
# log((1 + s) / (1 - s)) = s * (2 + 2/3 s^2 + 2/5 s^4 + ...); for |s| < 0.172, 12 terms leave < 1e-18.
_LOG_SERIES = tuple(2.0 / (2 * k + 1) for k in range(12))

_PIECE = 1 << 20  # elements that the reference computes at a time, to bound its int64 and fp64 temporaries


def site_key(seed: int, name: str) -> int:
    """Derive the 64-bit key of the site called `name`: the full name of a parameter or of a dropout.

    The key is a hash and not a counter, so a new site does not change the numbers of other sites.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def signed64(value: int) -> int:
    """Convert a 64-bit word to the signed integer with the same bits, the only kind in operator schemas.

    Raises:
        ValueError: `value` is not in [0, 2^64).
    """
    if not 0 <= value < 1 << 64:
        raise ValueError(f"a Philox key has 64 bits: got {value}; derive it with site_key(seed, name)")
    return value - (1 << 64) if value >> 63 else value


def philox(counter: Sequence[Tensor], key: int) -> list[Tensor]:
    """Return four random 32-bit words from four counter words and a 64-bit key (Philox4x32-10).

    Words are int64 tensors with values in [0, 2^32), lowest word first. A 32 by 32 bit product wraps into
    the sign bit of int64; the masks restore both halves.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK32, (product1 >> 32) & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK32, high0 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return [c0, c1, c2, c3]


def random_words(first: Tensor, length: int, sample: Tensor, key: int) -> Tensor:
    """Return random 32-bit words of the elements first, first + 1, ... first + length - 1 of each sample.

    Element e of sample n is word e % 4 of the block with counter (e // 4, n), 64 bits each.

    Args:
        first: int64, [...], index of the first element.
        length: number of consecutive elements.
        sample: int64, broadcastable against `first`.
        key: 64 bits, signed or unsigned.

    Returns:
        int64 in [0, 2^32), [..., length].
    """
    first, sample = torch.broadcast_tensors(first, sample)
    num_blocks = (length + 6) // 4  # enough if the first element is the last word of its block
    block = (first >> 2).unsqueeze(-1) + torch.arange(num_blocks, device=first.device)
    sample = sample.unsqueeze(-1).expand_as(block)
    counter = [word for value in (block, sample) for word in (value & _MASK32, (value >> 32) & _MASK32)]
    words = torch.stack(philox(counter, key), dim=-1).flatten(-2)  # [..., num_blocks * 4]
    position = (first & 3).unsqueeze(-1) + torch.arange(length, device=first.device)
    return words.gather(-1, position)


def standard_normal(words: Tensor) -> Tensor:
    """Convert 32-bit words to fp64 standard normal numbers with the inverse distribution function (AS 241).

    The uniform number (word + 1/2) / 2^32 is exact in fp64; |normal| is at most 6.34. The code does not
    divide by scalars, because CUDA multiplies by the reciprocal instead, which rounds differently.
    """
    p = (words.double() + 0.5) * 2.0**-32
    q = p - 0.5
    central = q.abs() <= 0.425
    tail = torch.where(q < 0, p, 1.0 - p)
    r = torch.where(central, 0.180625 - q * q, _sqrt(-_log(tail)) - 1.6)
    num = torch.where(central, _horner(_CENTRAL_NUM, r), _horner(_TAIL_NUM, r))
    den = torch.where(central, _horner(_CENTRAL_DEN, r), _horner(_TAIL_DEN, r))
    factor = torch.where(central, q, q.sign())
    return factor * num / den


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [1/2, 1)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa + mantissa, mantissa)
    exponent = exponent - low.to(exponent.dtype)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent.double() * _LN2 + s * _horner(_LOG_SERIES, s * s)


def _sqrt(x: Tensor) -> Tensor:
    inverse = (_INVERSE_SQRT_GUESS - (x.view(torch.int64) >> 1)).view(torch.float64)
    half = 0.5 * x
    for _ in range(4):
        inverse = inverse * (1.5 - half * inverse * inverse)
    return x * inverse


def _horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def fill_normal_(
    out: Tensor,
    key: int,
    *,
    std: float,
    mean: float = 0.0,
    base: int = 0,
    run_length: int | None = None,
    run_stride: int | None = None,
) -> Tensor:
    """Fill a local shard with the normal numbers that its elements have in the full tensor.

    Element e of `out` is element `base + (e // run_length) * run_stride + e % run_length` of the full
    tensor: a slice along a dim consists of evenly spaced runs of consecutive elements. Numbers are computed
    in fp64 and rounded to fp32, then to the dtype of `out`, so a bf16 weight is the rounded fp32 weight.

    Args:
        out: contiguous, fp64, fp32, bf16 or fp16.
        key: 64 bits, from `site_key(seed, parameter's full name)`.
        std: standard deviation.
        base: index of the first element in the full tensor.
        run_length: number of consecutive elements in a run; by default all of `out`.
        run_stride: distance between the first elements of consecutive runs; by default `run_length`.

    Returns:
        `out`.

    Raises:
        ValueError: `out` is not contiguous, or an index would be negative.
    """
    length = max(1, out.numel()) if run_length is None else run_length
    stride = length if run_stride is None else run_stride
    if not out.is_contiguous():
        raise ValueError(f"fill_normal_ needs a contiguous tensor: got strides {out.stride()}")
    if base < 0 or length < 1 or stride < 0:
        raise ValueError(
            f"fill_normal_ needs base >= 0, run_length >= 1, run_stride >= 0: got {base}, {length}, {stride}"
        )
    torch.ops.megalite.fill_normal_(out, std, mean, signed64(key), base, length, stride)
    return out


@torch.no_grad()
def fill_reference(
    out: Tensor, std: float, mean: float, key: int, base: int, run_length: int, run_stride: int
) -> None:
    """Implement the operator in plain PyTorch, with the same bits as the compiled one."""
    flat = out.view(-1)
    sample = torch.zeros((), dtype=torch.int64, device=out.device)
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE]
        element = torch.arange(begin, begin + piece.numel(), device=out.device)
        run = element.div(run_length, rounding_mode="floor")
        index = base + run * run_stride + (element - run * run_length)
        value = standard_normal(random_words(index, 1, sample, key).squeeze(-1)) * std + mean
        piece.copy_(value if out.dtype == torch.float64 else value.float())


define(
    "fill_normal_",
    "(Tensor(a!) out, float std, float mean, int key, int base, int run_length, int run_stride) -> ()",
    fill_reference,
    no_result,
)
