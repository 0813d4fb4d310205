"""The cross-entropy and the logarithm of the sums, and both gradients, are those of plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from megalite.distributed.axis import Axis
from megalite.tensor_parallel.vocab_parallel import losses_and_log_sums

ONE_RANK = Axis("tp", 1, 0, (0,), None)  # type: ignore[arg-type]
VOCAB, PADDING = 37, 5
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (129, 2)], ids=str)
def test_both_losses_are_the_formulas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With masked tokens, and with sums below 1, whose logarithms are negative."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(*shape, VOCAB + PADDING, generator=generator) * 3.0 - 4.0).to(dtype)
    targets = torch.randint(VOCAB, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.3
    leaf, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()

    losses, log_sums = losses_and_log_sums(leaf * 1.0, targets, VOCAB, ONE_RANK)
    ((losses + 0.1 * log_sums.square()) * mask).sum().backward()
    expected_sums = reference[..., :VOCAB].logsumexp(-1)
    expected = expected_sums - reference.gather(-1, targets[..., None]).squeeze(-1)
    ((expected + 0.1 * expected_sums.square()) * mask).sum().backward()

    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(losses.double(), expected, **tolerance)
    torch.testing.assert_close(log_sums.double(), expected_sums, **tolerance)
    assert leaf.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(leaf.grad.double(), reference.grad, **tolerance)
    assert not leaf.grad[..., VOCAB:].any()
