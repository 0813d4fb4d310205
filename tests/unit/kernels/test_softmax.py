"""Softmax of attention: the compiled kernel, its backward, what a query sees, against the formula in fp64."""

import pytest
import torch
from torch import Tensor

from megalite.kernels import CausalSoftmax, Drop, VisibleKeys, dropout, site_key
from megalite.kernels.softmax import reference, reference_backward

KEY = site_key(1, "attention.weights")
SHAPES = [
    (1, 1, 1, 1, 0, 0, 1),
    (2, 3, 7, 7, 0, 0, 7),
    (1, 2, 5, 130, 125, 0, 130),
    (2, 1, 3, 40, 37, 0, 97),
    (3, 2, 0, 5, 5, 0, 5),
    (2, 3, 4, 23, 36, 17, 50),
    (2, 2, 4, 24, 36, 16, 44),
]
"""b, n, rows, keys, first, first_key and s."""
ROUNDING = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
OPTIONS = ["plain", "alibi", "documents", "dropout", "all", "both sides", "all, both sides"]


def softmax_of(option: str, b: int, n: int, s: int) -> CausalSoftmax:
    made = CausalSoftmax(s, 0.37)
    if option in ("alibi", "all", "all, both sides"):
        made = made._replace(slopes=torch.rand(n, dtype=torch.float64))
    if option not in ("plain", "alibi", "dropout"):
        starts = torch.arange(s).expand(b, s) - torch.arange(b)[:, None]
        made = made._replace(visible=VisibleKeys((starts // 3 * 3).clamp_min(0).contiguous()))
    if "both sides" in option:
        assert made.visible.starts is not None
        ends = (made.visible.starts + 4).clamp_min(torch.arange(1, s + 1))
        made = made._replace(visible=VisibleKeys(made.visible.starts, ends))
    if option in ("dropout", "all", "all, both sides"):
        made = made._replace(drop=Drop(0.3, KEY, torch.arange(b) + 2**33, base=4 * s * s))
    return made


def expected_weights(
    scores: Tensor, softmax: CausalSoftmax, first: int, first_key: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """By the formula, out of whole tensors: differentiable, in fp64; `sinks` are in the sums."""
    b, n, rows, keys = scores.shape
    s = softmax.seq_length
    queries, places = torch.arange(first, first + rows)[:, None], torch.arange(keys) + first_key
    x = scores.double() * softmax.scale
    if softmax.cap is not None:
        x = softmax.cap * torch.tanh(x / softmax.cap)
    if softmax.slopes is not None:
        x = x + softmax.slopes[:, None, None] * (places - queries)
    starts, ends = softmax.visible[:2]
    after = queries + 1 if ends is None else ends[:, None, first : first + rows, None]
    seen = (places < after).expand(b, 1, rows, keys)
    if starts is not None:
        seen = seen & (places >= starts[:, None, first : first + rows, None])
    x = x.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        x = torch.cat((x, sinks[:, None, None].expand(b, n, rows, 1)), dim=-1)
    weights = torch.softmax(x, dim=-1)[..., :keys]
    if softmax.drop is not None:
        p, key, samples, base, _ = softmax.drop
        kept = dropout(torch.ones(1, b, n, s, s, dtype=torch.float64), p, key, samples, base=base)[0]
        weights = weights * kept[:, :, first : first + rows, first_key : first_key + keys]
    return weights


def scores_of(shape: tuple[int, ...], dtype: torch.dtype, softmax: CausalSoftmax) -> Tensor:
    b, n, rows, keys, first, first_key, _ = shape
    scores = (3 * torch.randn(b, n, rows, keys, dtype=torch.float64)).to(dtype)
    places = torch.arange(keys) + first_key
    after = places > torch.arange(first, first + rows)[:, None]
    if softmax.visible.ends is not None:
        after = places >= softmax.visible.ends[:, None, first : first + rows, None]
    return scores.masked_fill_(after, torch.nan)  # nothing may read them


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", ["op", "reference"])
def test_weights_and_gradients_are_those_of_the_formula(
    implementation: str, shape: tuple[int, ...], option: str, dtype: torch.dtype
) -> None:
    b, n, rows, keys, first, first_key, s = shape
    softmax = softmax_of(option, b, n, s)
    given = scores_of(shape, dtype, softmax)
    leaf = given.nan_to_num().double().requires_grad_()
    expected = expected_weights(leaf, softmax, first, first_key)
    gradient = torch.randn(b, n, rows, keys, dtype=torch.float64).to(dtype)
    expected.backward(gradient.double())

    weights, again, grad = given.clone(), given.clone(), gradient.clone()
    arguments = softmax.arguments(first, first_key)
    if implementation == "op":
        log_sums = softmax.weights_(weights, first, first_key)
        softmax.backward_(again, grad, log_sums, first, first_key)
    else:
        log_sums = reference(weights, *arguments)
        reference_backward(again, grad, log_sums, *arguments)
    close = {"rtol": 4 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(weights.double(), expected.detach(), **close)
    torch.testing.assert_close(again.double(), expected.detach(), **close)
    assert leaf.grad is not None
    torch.testing.assert_close(grad.double(), leaf.grad, **close)
    assert log_sums.dtype == torch.promote_types(dtype, torch.float32)


def test_dropout_is_the_mask_of_whole_weights_bit_by_bit() -> None:
    b, n, s = 2, 4, 33
    numbers = torch.tensor([5, 2**40])
    whole = dropout(torch.ones(1, b, n, s, s), 0.5, KEY, numbers, base=7 * s * s)[0].tril()
    softmax = CausalSoftmax(s, 1.0, drop=Drop(0.5, KEY, numbers, base=7 * s * s))
    for samples, heads in ((slice(0, 2), slice(0, 4)), (slice(1, 2), slice(1, 3))):
        part = softmax.part(samples, heads)
        for first, last in ((0, 10), (10, 33)):
            scores = torch.zeros(len(numbers[samples]), heads.stop - heads.start, last - first, last)
            part.weights_(scores, first)
            assert torch.equal(scores != 0, whole[samples, heads, first:last, :last] != 0)


def test_parts_keep_their_slopes_and_starts() -> None:
    softmax = softmax_of("all", 3, 4, 9)
    scores = torch.randn(3, 4, 9, 9)
    whole = scores.clone()
    softmax.weights_(whole, 0)
    part = scores[1:3, 2:4].contiguous()
    softmax.part(slice(1, 3), slice(2, 4)).weights_(part, 0)
    assert torch.equal(part, whole[1:3, 2:4])


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    scores, softmax = torch.randn(2, 5, 64, 300), softmax_of("all", 2, 5, 300)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            weights, again, grad = scores.clone(), scores.clone(), scores.flip(0).contiguous()
            log_sums = softmax.weights_(weights, 236)
            softmax.backward_(again, grad, log_sums, 236)
            results.append((weights, log_sums, again, grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, many) for one, many in zip(*results, strict=True))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    scores = torch.tensor([[-1e4, 9e3, 9e3, -3e38]]).expand(1, 1, 4, 4).contiguous()
    CausalSoftmax(4, 1.0).weights_(scores, 0)
    assert torch.equal(
        scores[0, 0], torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0]])
    )


def test_not_a_number_stays_one() -> None:
    """Else a broken run would go on."""
    scores = torch.zeros(1, 1, 3, 3)
    scores[0, 0, 1, 1] = torch.nan
    CausalSoftmax(3, 1.0).weights_(scores, 0)
    assert scores[0, 0].isnan().tolist() == [[False] * 3, [True, True, False], [False] * 3]


def test_opcheck() -> None:
    for option in ("plain", "all"):
        softmax = softmax_of(option, 2, 3, 9)
        scores, grad = torch.randn(2, 3, 4, 9), torch.randn(2, 3, 4, 9)
        log_sums = softmax.weights_(scores.clone(), 5)
        rest = softmax.arguments(5)
        torch.library.opcheck(torch.ops.megalite.causal_softmax_.default, (scores, *rest))
        torch.library.opcheck(
            torch.ops.megalite.causal_softmax_backward_.default, (scores, grad, log_sums, *rest)
        )


@pytest.mark.usefixtures("compiled")
def test_what_does_not_fit_is_refused() -> None:
    softmax = CausalSoftmax(8, 1.0)
    with pytest.raises(RuntimeError, match="contiguous"):
        softmax.weights_(torch.zeros(1, 2, 8, 8).transpose(2, 3), 0)
    with pytest.raises(RuntimeError, match="beyond the keys"):
        softmax.weights_(torch.zeros(1, 2, 4, 8), 5)
    with pytest.raises(RuntimeError, match="beyond the keys"):
        softmax.weights_(torch.zeros(1, 2, 4, 9), 0)
    with pytest.raises(RuntimeError, match="beyond the keys"):
        softmax.weights_(torch.zeros(1, 2, 4, 8), 0, 1)
    with pytest.raises(RuntimeError, match="slopes"):
        softmax._replace(slopes=torch.ones(2)).weights_(torch.zeros(1, 2, 8, 8), 0)
    visible = VisibleKeys(torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="starts"):
        softmax._replace(visible=visible).weights_(torch.zeros(1, 2, 8, 8), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_weights(dtype: torch.dtype) -> None:
    scores, softmax = torch.randn(2, 3, 5, 9).to(dtype), softmax_of("all", 2, 3, 9)
    remote = scores.cuda()
    assert softmax.slopes is not None and softmax.visible.starts is not None and softmax.drop is not None
    softmax._replace(
        slopes=softmax.slopes.cuda(),
        visible=VisibleKeys(softmax.visible.starts.cuda()),
        drop=softmax.drop._replace(sample_numbers=softmax.drop.sample_numbers.cuda()),
    ).weights_(remote, 4)
    softmax.weights_(scores, 4)
    close = {"rtol": 4 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(remote.cpu(), scores, **close)
