"""Dropout by counter: the compiled kernel, layouts, gradient, and what a mask depends on."""

import math

import pytest
import torch
from torch import Tensor

import megalite.kernels
from megalite.kernels import dropout, site_key
from megalite.kernels.dropout import reference
from megalite.kernels.philox import random_words, signed64

KEY = site_key(1234, "layers.0.hidden_dropout")


def samples(num: int) -> Tensor:
    return torch.arange(num) * 2**33 + 11


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("num", [0, 1, 3, 127, 4097])
@pytest.mark.parametrize(("base", "gap"), [(0, 0), (2**34 - 2, 0), (5, 3)])
@pytest.mark.parametrize("p", [0.1, 0.5, 1 - 1e-12])
def test_compiled_equals_reference(num: int, base: int, gap: int, p: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, num, generator=torch.Generator().manual_seed(1)).to(dtype)
    arguments = (samples(2), p, signed64(KEY), base, num + gap)
    assert torch.equal(torch.ops.megalite.dropout(x, *arguments), reference(x, *arguments))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_rounds_as_torch_rounds(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).expand(8, 1, -1)
    arguments = (samples(1), 0.3, signed64(KEY), 0, 2**16)
    result, expected = torch.ops.megalite.dropout(x, *arguments), reference(x, *arguments)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit() & ~result.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    x = torch.randn(7, 3, 9001)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = dropout(x, 0.1, KEY, samples(3))
        torch.set_num_threads(1)
        assert torch.equal(many, dropout(x, 0.1, KEY, samples(3)))
    finally:
        torch.set_num_threads(threads)


def test_kept_elements_are_scaled_and_dropped_ones_zero() -> None:
    x = torch.randn(50, 4, 100)
    x[0, 0, :] = math.inf
    y = dropout(x, 0.25, KEY, samples(4))
    kept = y != 0
    assert torch.equal(y[kept], (x * torch.tensor(1 / 0.75))[kept])
    assert abs(kept.float().mean() - 0.75) < 4 * math.sqrt(0.25 * 0.75 / x.numel())


def test_an_element_at_the_threshold_is_kept() -> None:
    word = int(random_words(torch.tensor(6), 1, samples(1), KEY))
    for p, is_kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
        arguments = (torch.ones(1, 1, 9), samples(1), p, signed64(KEY), 0, 9)
        for op in (torch.ops.megalite.dropout, reference):
            assert (op(*arguments)[0, 0, 6] != 0) == is_kept


def test_the_mask_follows_the_sample_not_its_place() -> None:
    x = torch.ones(5, 4, 30)
    numbers = torch.tensor([3, 1, 4, 1])
    y = dropout(x, 0.5, KEY, numbers)
    assert torch.equal(y[:, 1], y[:, 3])
    assert not torch.equal(y[:, 0], y[:, 1])
    single = [dropout(x[:, i : i + 1], 0.5, KEY, numbers[i : i + 1]) for i in range(4)]
    assert torch.equal(y, torch.cat(single, dim=1))


def test_shards_of_hidden_states_and_heads_meet_the_same_fate() -> None:
    hidden = torch.randn(6, 2, 15)  # [s, b, h]
    full = dropout(hidden, 0.5, KEY, samples(2))
    by_position = [dropout(hidden[i : i + 2], 0.5, KEY, samples(2), base=i * 15) for i in (0, 2, 4)]
    assert torch.equal(full, torch.cat(by_position))
    by_feature = [
        dropout(hidden[..., i : i + 5], 0.5, KEY, samples(2), base=i, stride=15) for i in (0, 5, 10)
    ]
    assert torch.equal(full, torch.cat(by_feature, dim=-1))
    probabilities = torch.rand(1, 2, 4, 7, 7)  # [1, b, heads, s, s]
    full = dropout(probabilities, 0.5, KEY, samples(2))
    by_head = [dropout(probabilities[:, :, i : i + 2], 0.5, KEY, samples(2), base=i * 49) for i in (0, 2)]
    assert torch.equal(full, torch.cat(by_head, dim=2))


def test_strided_input_and_gradient() -> None:
    x = torch.randn(9, 4, 6).transpose(0, 2)
    assert torch.equal(dropout(x, 0.5, KEY, samples(4)), dropout(x.contiguous(), 0.5, KEY, samples(4)))
    leaf = torch.ones(5, 2, 7, requires_grad=True)
    y = dropout(leaf, 0.5, KEY, samples(2))
    y.sum().backward()  # its gradient is a number expanded
    assert torch.equal(leaf.grad, y)


def test_gradient_is_right_and_nothing_large_is_saved() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t, 0.4, KEY, samples(2)), x)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, 0.4, KEY, samples(2))
    assert [t.shape for t in saved] == [(2,)]


def test_neither_keys_nor_samples_are_correlated() -> None:
    x = torch.ones(1, 2, 100_000)
    y = dropout(x, 0.5, KEY, torch.tensor([0, 1]))[0]
    z = dropout(x, 0.5, KEY + 1, torch.tensor([0, 1]))[0]
    bound = 4 / math.sqrt(x.shape[-1])
    correlation = torch.corrcoef(torch.cat([y, z, y[:1].roll(1), y[:1].roll(4)]))
    assert (correlation - torch.eye(6)).abs().max() < bound


def test_no_dropout_is_no_operation() -> None:
    x = torch.randn(2, 3)
    assert dropout(x, 0.0, KEY, samples(3)) is x


def test_meta_tensors_have_the_shape() -> None:
    x = torch.empty(4, 2, 3, device="meta", dtype=torch.bfloat16)
    y = dropout(x, 0.1, KEY, torch.empty(2, dtype=torch.int64, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")


def test_opcheck() -> None:
    x = torch.randn(3, 2, 5, requires_grad=True)
    for tensor in (x, torch.randn(5, 2, 3).transpose(0, 2)):
        torch.library.opcheck(torch.ops.megalite.dropout.default, (tensor, samples(2), 0.3, -7, 2, 6))


@pytest.mark.parametrize(
    ("p", "shape", "numbers", "base", "message"),
    [
        (1.0, (2, 3), torch.arange(3), 0, "0 <= p < 1"),
        (-0.1, (2, 3), torch.arange(3), 0, "0 <= p < 1"),
        (0.1, (2, 3), torch.arange(2), 0, "sample_numbers"),
        (0.1, (2, 3), torch.arange(3.0), 0, "int64"),
        (0.1, (3,), torch.arange(3), 0, "sample_numbers"),
        (0.1, (2, 3), torch.arange(3), -1, "base >= 0"),
    ],
)
def test_mistakes_are_named(
    p: float, shape: tuple[int, ...], numbers: Tensor, base: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dropout(torch.ones(shape), p, KEY, numbers, base=base)


def test_describe_names_every_operator() -> None:
    ops = ", ".join(megalite.kernels._OPS)
    assert "dropout, fill_normal_" in ops
    assert megalite.kernels.describe("meta") == f"{ops}: eager (no compiled kernel for meta)"
    described = megalite.kernels.describe()
    assert described.startswith(ops) and "round_moments_: " in described


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(33, 4, 1001).to(dtype)
    local = dropout(x, 0.1, KEY, samples(4), base=3)
    remote = dropout(x.cuda(), 0.1, KEY, samples(4).cuda(), base=3)
    assert torch.equal(local, remote.cpu())
