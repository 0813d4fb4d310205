"""Recomputed functions have bitwise the gradients of plain ones, and keep nothing but their inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megalite.model.recompute_region import recompute, recompute_output
from megalite.utils.wrapping import wrap_point
from tests.live_bytes import LiveBytes

S, B, H = 16, 3, 32


def full(name, *shape):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Block(nn.Module):
    """Norm, GEMM, activation, GEMM."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.up = nn.Linear(H, 4 * H, bias=False, dtype=torch.float64)
        self.down = nn.Linear(4 * H, H, bias=False, dtype=torch.float64)
        self.up.weight.data, self.down.weight.data = full("up", 4 * H, H), full("down", H, 4 * H)
        self.runs = 0

    @wrap_point
    def normalize(self, x):
        return self.norm(x)

    @wrap_point
    def project_up(self, x):
        return self.up(x)

    @wrap_point
    def activation(self, x):
        self.runs += 1
        return F.gelu(x)

    @wrap_point
    def project_down(self, x):
        return self.down(x)

    def forward(self, x, y=None):
        hidden = self.activation(self.project_up(self.normalize(x)))
        return self.project_down(hidden) + (x if y is None else x * y)


def in_parts(block):
    """Recompute the norm and the activation."""
    recompute_output(block, "normalize", block, "project_up")
    recompute_output(block, "activation", block, "project_down")


def chain(block, x):
    return block(block(x))


FORMS = {
    "whole": (lambda _: None, recompute, Block.__call__, ("x",)),
    "of two inputs": (lambda _: None, recompute, Block.__call__, ("x", "y")),
    "in parts": (in_parts, Block.__call__, Block.__call__, ("x",)),
    "a chain": (lambda _: None, lambda block, x: recompute(block, recompute(block, x)), chain, ("x",)),
    "a chain in parts": (in_parts, chain, chain, ("x",)),
}
"""What is done to the block, how it runs then, how it runs without recomputation, and its inputs."""


def gradients(block, run, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    hooks = []
    block.up.weight.register_post_accumulate_grad_hook(lambda _: hooks.append("up"))
    y = run(block, *inputs)
    y.backward(full("dy", S, B, H))
    assert hooks == ["up"]
    return block.runs, [y.detach(), *(x.grad for x in inputs), *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_bitwise_the_same(form):
    apply, recomputed, plain, names = FORMS[form]
    inputs = [full(name, S, B, H) for name in names]
    block = Block()
    apply(block)
    more_runs, found = gradients(block, recomputed, *inputs)
    runs, expected = gradients(Block(), plain, *inputs)
    assert more_runs == 2 * runs  # once more for each, and no more
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def live(run, apply=lambda _: None):
    """Return the elements that are alive between forward and backward, without the input."""
    block, x = Block(), full("x", S, B, H).requires_grad_()
    apply(block)
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
    assert live(Block.__call__) == everything
    assert live(recompute) == output
    assert live(Block.__call__, in_parts) == tokens * 4 * H + output


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
