"""Recomputed functions have bitwise the gradients of plain ones, and keep nothing but their inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megalite.parallel.recompute import compute, compute_between, recompute, recompute_between
from tests.live_bytes import LiveBytes

S, B, H = 16, 3, 32


def full(name, *shape):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Block(nn.Module):
    """Norm, product, activation, product."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(full("up", 4 * H, H))
        self.down = nn.Parameter(full("down", H, 4 * H))
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.runs = 0

    def activation(self, x):
        self.runs += 1
        return F.gelu(x)

    def forward(self, x, y=None):
        hidden = self.activation(F.linear(self.norm(x), self.up))
        return F.linear(hidden, self.down) + (x if y is None else x * y)


def gradients(run, *inputs):
    block = Block()
    inputs = [x.clone().requires_grad_() for x in inputs]
    hooks = []
    block.up.register_post_accumulate_grad_hook(lambda _: hooks.append("up"))
    y = run(block, *inputs)
    y.backward(full("dy", S, B, H))
    assert hooks == ["up"]
    return block.runs, [y.detach(), *(x.grad for x in inputs), *(p.grad for p in block.parameters())]


def between(run):
    def block_in_parts(block, x):
        hidden = run(block.norm, x, lambda a: F.linear(a, block.up))
        return run(block.activation, hidden, lambda a: F.linear(a, block.down)) + x

    return block_in_parts


FORMS = {
    "whole": (recompute, compute, ("x",)),
    "of two inputs": (recompute, compute, ("x", "y")),
    "in parts": (between(recompute_between), between(compute_between), ("x",)),
    "a chain": (
        lambda block, x: recompute(block, recompute(block, x)),
        lambda block, x: block(block(x)),
        ("x",),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_bitwise_the_same(form):
    recomputed, plain, names = FORMS[form]
    inputs = [full(name, S, B, H) for name in names]
    more_runs, found = gradients(recomputed, *inputs)
    runs, expected = gradients(plain, *inputs)
    assert more_runs == 2 * runs  # once more for each, and no more
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def live(run):
    """Elements alive between forward and backward, without the input."""
    block, x = Block(), full("x", S, B, H).requires_grad_()
    with LiveBytes() as bytes_:
        y = run(block, x)
        kept = bytes_.count()
        y.sum().backward()
        del y
        left = bytes_.count()
    assert left == sum(p.grad.nbytes for p in (*block.parameters(), x))  # nothing outlives backward
    return kept // 8


def test_what_is_kept():
    tokens = S * B
    statistics = 2 * tokens  # of the norm
    output = tokens * H
    everything = tokens * (H + 4 * H + 4 * H) + statistics + output  # norm's, up's and activation's outputs
    assert live(lambda block, x: block(x)) == everything
    assert live(between(compute_between)) == everything
    assert live(recompute) == output
    assert live(between(recompute_between)) == tokens * 4 * H + output


def test_a_second_backward_is_refused():
    block, x = Block(), full("x", S, B, H).requires_grad_()
    y = recompute(block, x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="second backward"):
        y.backward()


@torch.no_grad()
def test_without_gradients_nothing_runs_twice():
    block = Block()
    assert torch.equal(recompute(block, full("x", S, B, H)), block(full("x", S, B, H)))
    assert block.runs == 2
