"""The chunks give what the recurrence gives, token by token; so do samples of several documents."""

import pytest
import torch
import torch.nn.functional as F

from megalite.model.delta_rule import gated_delta_rule

B, G, R, D, E = 2, 2, 3, 5, 4


def recurrence(q, k, v, decay, rate, starts=None, state=None):
    """The definition; shapes as in `gated_delta_rule`."""
    outputs = []
    state = v.new_zeros(*v.shape[:3], q.shape[-1], v.shape[-1]) if state is None else state
    for t in range(q.shape[-2]):
        if starts is not None:
            state = state * (starts[:, t] < t).view(-1, 1, 1, 1, 1)
        state = state * decay[..., t].exp()[..., None, None]
        key, query = k[:, :, None, t, :, None], q[:, :, None, t, :, None]
        change = (v[..., t, None, :] - key.mT @ state) * rate[..., t, None, None]
        state = state + key @ change
        outputs.append(query.mT @ state)
    return torch.cat(outputs, dim=-2), state


def arguments(num_tokens, decay=1.0):
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(B, G, num_tokens, D), dim=-1) for _ in range(2))
    v = normal(B, G, R, num_tokens, E)
    decays, rates = -decay * normal(B, G, R, num_tokens).exp(), normal(B, G, R, num_tokens).sigmoid()
    return [each.requires_grad_() for each in (q, k, v, decays, rates)]


def starts_of(num_tokens):
    """Documents of 1, 2 and 3 tokens in the first sample, some at a chunk's start; one in the second."""
    first = torch.cat([torch.full((1 + i % 3,), i) for i in range(num_tokens)])[:num_tokens]
    is_first = first.diff(prepend=first[:1] - 1) != 0
    starts = torch.arange(num_tokens).where(is_first, 0).cummax(0).values
    return torch.stack((starts, torch.zeros_like(starts)))


def assert_same(found, expected, inputs):
    grads = [torch.randn_like(each) for each in expected]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(each, inputs, grads) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 11, 16])
def test_chunks_are_the_recurrence(num_tokens, has_documents):
    inputs, starts = arguments(num_tokens), starts_of(num_tokens) if has_documents else None
    found = gated_delta_rule(*inputs, starts, chunk=4)
    assert_same(found, recurrence(*inputs, starts), inputs)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_the_state_goes_on(num_tokens):
    inputs = arguments(num_tokens)
    state = torch.randn(B, G, R, D, E, dtype=torch.float64).requires_grad_()
    found = gated_delta_rule(*inputs, state=state, chunk=4)
    assert_same(found, recurrence(*inputs, state=state), [*inputs, state])


@pytest.mark.parametrize("size", [2**7, 2**11])
def test_large_decays_and_document_starts_stay_finite(size):
    inputs = arguments(70, decay=size)
    found = gated_delta_rule(*(each.float() for each in inputs), starts_of(70))
    gradients = torch.autograd.grad(sum(each.sum() for each in found), inputs)
    assert all(each.isfinite().all() for each in (*found, *gradients))
