"""The norm's accuracy on one rank."""

from __future__ import annotations

import torch

from megalite.optim.gradient_scale import BLOCKS, global_norm

BLOCK = BLOCKS["cpu"]


def test_large_fp32_gradients_lose_nothing(topology):
    """torch's own norm of 2^23 elements in fp32 is off by 2e-4 on a CPU."""
    gradient = torch.randn(2**23 + 5, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    torch.testing.assert_close(global_norm([gradient], topology), expected, rtol=1e-6, atol=0.0)


def test_every_element_counts_whatever_the_shapes(topology):
    shapes = [(1,), (3, 5), (BLOCK,), (BLOCK + 1,), (2, BLOCK - 1), (0,)]
    gradients = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(global_norm(gradients, topology), expected, rtol=1e-14, atol=0.0)


def test_a_norm_whose_square_overflows_fp32(topology):
    """Each block's norm is within fp32, and so is the whole's; their squares are not."""
    gradient = torch.zeros(4 * BLOCK)
    gradient[::BLOCK] = 1.5e19
    assert abs(global_norm([gradient], topology).item() / 3e19 - 1.0) < 1e-6


def test_no_gradients(topology):
    assert global_norm([], topology).item() == 0.0
