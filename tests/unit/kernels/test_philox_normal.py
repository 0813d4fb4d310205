"""Initial weights by counter: the compiled kernel, shards, dtypes, and whether the numbers are normal."""

import math

import pytest
import torch
from torch import Tensor

from megalite.kernels import fill_normal_, site_key
from megalite.kernels.philox import fill_reference, signed64

KEY = site_key(1234, "layers.0.weight")


def filled(*shape: int, dtype: torch.dtype = torch.float32, **options: int) -> Tensor:
    return fill_normal_(torch.empty(shape, dtype=dtype), KEY, std=0.02, **options)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("num", [0, 1, 3, 127, 4097])
@pytest.mark.parametrize(
    ("base", "run_length", "run_stride"), [(0, 5000, 5000), (2**34 - 3, 5000, 5000), (5, 7, 13), (2, 1, 3)]
)
def test_compiled_equals_reference(
    num: int, base: int, run_length: int, run_stride: int, dtype: torch.dtype
) -> None:
    arguments = (0.7, 0.1, signed64(KEY), base, run_length, run_stride)
    expected, result = torch.full((2, num), math.nan, dtype=dtype)
    fill_reference(expected, *arguments)
    torch.ops.megalite.fill_normal_(result, *arguments)
    assert torch.equal(result, expected)


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = filled(100_003)
        torch.set_num_threads(1)
        assert torch.equal(many, filled(100_003))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("num_shards", [2, 3])
def test_a_shard_is_a_slice_of_the_full_tensor(dim: int, num_shards: int) -> None:
    shape = (6, 12, 18)
    full = filled(*shape)
    inner = math.prod(shape[dim + 1 :])
    run = shape[dim] // num_shards * inner
    for rank, expected in enumerate(full.chunk(num_shards, dim)):
        local = filled(*expected.shape, base=rank * run, run_length=run, run_stride=shape[dim] * inner)
        assert torch.equal(local, expected)


def test_lower_precisions_are_the_fp32_weights_rounded() -> None:
    single = filled(1000)
    assert torch.equal(filled(1000, dtype=torch.float64).float(), single)
    assert torch.equal(filled(1000, dtype=torch.bfloat16), single.bfloat16())
    assert torch.equal(filled(1000, dtype=torch.float16), single.half())


def test_numbers_are_normal() -> None:
    num = 200_000
    value, _ = fill_normal_(torch.empty(num, dtype=torch.float64), KEY, std=2.0, mean=3.0).sort()
    z = (value - 3.0) / 2.0
    assert abs(z.mean()) < 4 / math.sqrt(num)
    assert abs(z.var() - 1.0) < 4 * math.sqrt(2 / num)
    assert abs((z**4).mean() - 3.0) < 4 * math.sqrt(96 / num)
    distance = (torch.special.ndtr(z) - (torch.arange(num) + 0.5) / num).abs().max()
    assert distance < 1.95 / math.sqrt(num)  # Kolmogorov-Smirnov at 0.1%


def test_keys_and_neighbours_are_independent() -> None:
    num = 100_000
    one, other = (fill_normal_(torch.empty(num), site_key(1, name), std=1.0) for name in ("a", "b"))
    for left, right in ((one, other), (one[:-1], one[1:]), (one[:-4], one[4:])):
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 4 / math.sqrt(num)


def test_meta_tensors_stay_meta() -> None:
    out = torch.empty(10**12, device="meta")
    assert fill_normal_(out, KEY, std=1.0) is out


def test_a_parameter_is_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.empty(5))
    with torch.no_grad():
        assert fill_normal_(parameter, KEY, std=0.02) is parameter
    assert torch.equal(parameter, filled(5))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.megalite.fill_normal_.default, (torch.empty(7, 3), 1.0, 0.0, -5, 3, 4, 9))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        fill_normal_(torch.empty(4, 3).t(), KEY, std=1.0)
    with pytest.raises(ValueError, match="run_length >= 1"):
        filled(4, run_length=0)
    with pytest.raises(ValueError, match="base >= 0"):
        filled(4, base=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_bits(dtype: torch.dtype) -> None:
    options = {"std": 0.7, "mean": 0.1, "base": 5, "run_length": 7, "run_stride": 13}
    local = fill_normal_(torch.empty(100_003, dtype=dtype), KEY, **options)
    remote = fill_normal_(torch.empty(100_003, dtype=dtype, device="cuda"), KEY, **options)
    assert torch.equal(local, remote.cpu())
