"""Cross-entropy in place: against fp64, parts of a vocabulary, and what autograd is told."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.distributed.topology import Topology
from megalite.kernels import cross_entropy_gradient_, cross_entropy_statistics
from megalite.kernels.cross_entropy import gradient_reference, statistics_reference
from megalite.tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy
from tests.unit.kernels.ulps import assert_within


def logits_of(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (8 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check(logits: Tensor, targets: Tensor, start: int, num_real: int) -> None:
    """Both passes against fp64."""
    found = cross_entropy_statistics(logits, targets, start, num_real)
    exact = statistics_reference(logits.double(), targets, start, num_real)
    assert torch.equal(found[::2].double(), exact[::2])
    assert_within(found[1], exact[1], 4 * exact[1])  # half a unit of each logit's distance from the largest
    if num_real == 0:
        exact[:2] = found[:2] = 1.0
    grad = torch.linspace(-1, 1, len(targets), dtype=found.dtype)
    result, expected = logits.clone(), logits.double()
    assert cross_entropy_gradient_(result, targets, found[:2], grad, start, num_real) is result
    gradient_reference(expected, targets, exact[:2], grad.double(), start, num_real)
    assert_within(result, expected, 2 * grad.double().abs()[:, None])
    assert not result[:, num_real:].any()


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("start", [0, 60])
@pytest.mark.parametrize("columns", [1, 3, 127, 4097])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_is_exact(rows: int, columns: int, start: int, padding: int, dtype: torch.dtype) -> None:
    logits = logits_of(rows, columns + padding, dtype=dtype)
    logits[:, columns:] = torch.nan
    targets = torch.randint(0, 4100, (rows,), generator=torch.Generator().manual_seed(1))
    check(logits, targets, start, columns)


def test_a_part_of_padding_alone(dtype: torch.dtype) -> None:
    check(torch.full((3, 8), torch.inf, dtype=dtype), torch.arange(3), 4, 0)


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=60),
    target=st.integers(0, 70),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_numbers(values: list[float], target: int, dtype: torch.dtype) -> None:
    check(torch.tensor([values], dtype=dtype), torch.tensor([target]), 0, len(values))


def test_minus_infinity_and_nan() -> None:
    logits = torch.full((3, 3000), -torch.inf)
    logits[1, 2999], logits[2, 5] = 2.0, torch.nan
    largest, total, _ = cross_entropy_statistics(logits, torch.zeros(3, dtype=torch.int64), 0, 3000)
    assert largest[:2].tolist() == [-torch.inf, 2.0]
    assert total[:2].tolist() == [0.0, 1.0]
    assert total[2].isnan()


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    logits, targets = logits_of(77, 2011, dtype=torch.bfloat16), torch.arange(77)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (3, 1):
            torch.set_num_threads(count)
            found = cross_entropy_statistics(logits, targets, 0, 2000)
            gradient = cross_entropy_gradient_(logits.clone(), targets, found[:2], found[0], 0, 2000)
            results.append((found, gradient))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_opcheck() -> None:
    logits, targets = torch.randn(5, 12), torch.arange(5)
    torch.library.opcheck(torch.ops.megalite.cross_entropy_statistics.default, (logits, targets, 0, 10))
    statistics = cross_entropy_statistics(logits, targets, 0, 10)[:2]
    torch.library.opcheck(
        torch.ops.megalite.cross_entropy_gradient_.default,
        (logits, targets, statistics, torch.randn(5), 0, 10),
    )


def test_the_gradient_lies_where_the_logits_were(one_rank: Topology) -> None:
    leaf = torch.randn(4, 2, 10, requires_grad=True)
    logits, seen = leaf * 1.0, []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    address = logits.data_ptr()
    targets = torch.randint(0, 10, (4, 2))
    vocab_parallel_cross_entropy(logits, targets, 10, one_rank.tp).sum().backward()
    again = leaf.detach().clone().requires_grad_()
    F.cross_entropy(again.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    expected = again.grad
    assert leaf.grad is not None and expected is not None
    torch.testing.assert_close(leaf.grad, expected)
    assert seen == [address]


def test_another_use_of_the_logits(one_rank: Topology) -> None:
    """A later one adds its gradient; one that has saved them for its backward is refused, as is a leaf."""
    leaf = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 3])

    logits = leaf * 1.0
    losses = vocab_parallel_cross_entropy(logits, targets, 7, one_rank.tp)
    (losses.sum() + 3.0 * logits[:, 1].sum()).backward()
    expected = leaf.detach().softmax(-1) - F.one_hot(targets, 7)
    expected[:, 1] += 3.0
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected)
    logits = leaf * 1.0
    square = logits.square().sum()
    loss = vocab_parallel_cross_entropy(logits, targets, 7, one_rank.tp).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + square).backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        vocab_parallel_cross_entropy(leaf, targets, 7, one_rank.tp)
