"""Attention in blocks of keys, merged, against attention with all keys."""

import torch
from torch import Tensor

from megalite.attention.kernels import Block, MergedAttention, merge_
from megalite.attention.plain import Blocking, PlainKernel
from megalite.config import ModelConfig
from megalite.distributed.topology import Topology
from megalite.kernels import CausalSoftmax
from megalite.kernels.softmax import VisibleKeys
from megalite.tensor_parallel.parameter_spec import LayerContext

S, WINDOW = 192, 20


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, S, 8), (2, 2, S, 8), (2, 2, S, 6), (2, 4, S, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(S)[:, None] - torch.arange(S)
    scores = (q @ k.repeat_interleave(2, 1).mT).masked_fill((distance < 0) | (distance > WINDOW), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(2, 1)


def test_only_some_queries_of_a_block_may_have_a_key_in_their_window(one_rank: Topology) -> None:
    *leaves, grad = (x.requires_grad_() for x in _inputs())
    expected = _formula(*leaves)
    of_formula = torch.autograd.grad(expected, leaves, grad)
    q, k, v = (x.detach() for x in leaves)
    visible = VisibleKeys().within(WINDOW, S, q.device).expand(2)
    softmax = CausalSoftmax(S, 1.0, visible=visible)
    kernel = PlainKernel(ModelConfig(), LayerContext(one_rank, torch.float64))
    kernel.blocking = Blocking(512, 1 << 20)

    slices = range(S // 2), range(S // 2, S)
    pairs = [Block(slices[0], slices[0]), Block(slices[1], slices[1]), Block(slices[1], slices[0])]
    rest = [part for part in kernel.blocking.parts(pairs[-1], 8, 8) if not part.seen(softmax)]
    assert rest, "all queries see a key: the test needs a shorter window"

    out, log_sums = torch.zeros_like(expected), q.new_full(q.shape[:3], -torch.inf)
    for block in pairs:
        rows, columns = (slice(each.start, each.stop) for each in block)
        found = kernel.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], block, softmax)
        merge_(out[:, :, rows], log_sums[:, :, rows], *found)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-13)

    whole = MergedAttention(grad.detach(), out, log_sums, (out * grad.detach()).sum(-1))
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for block in pairs:
        rows, columns = (slice(each.start, each.stop) for each in block)
        arguments = q[:, :, rows], k[:, :, columns], v[:, :, columns], whole.rows(rows), block, softmax
        for total, part, place in zip(
            grads, kernel.backward(*arguments), (rows, columns, columns), strict=True
        ):
            total[:, :, place] += part
    for found_grad, expected_grad in zip(grads, of_formula, strict=True):
        torch.testing.assert_close(found_grad, expected_grad, rtol=0, atol=1e-13)
