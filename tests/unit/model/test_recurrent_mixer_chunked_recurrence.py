"""The chunks give what the recurrence gives, token by token; so do samples of several documents."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from megalite.model.recurrent_mixer import chunked_recurrence

B, G, R, D, E = 2, 2, 3, 5, 4
DECAYS = pytest.mark.parametrize("per_key", [(), (D,)], ids=["a decay", "decays of elements"])
KINDS = pytest.mark.parametrize("is_delta", [True, False], ids=["delta rule", "state space"])


def recurrence(q, k, v, decay, rate, starts=None, state=None, is_delta=True):
    """The definition; shapes as in `chunked_recurrence`."""
    outputs = []
    state = v.new_zeros(*v.shape[:3], q.shape[-1], v.shape[-1]) if state is None else state
    for t in range(q.shape[-2]):
        if starts is not None:
            state = state * (starts[:, t] < t).view(-1, 1, 1, 1, 1)
        kept = (
            decay[..., t, :] if decay.dim() > rate.dim() else decay[..., t, None]
        )  # of each element, or one
        state = state * kept.exp().unsqueeze(-1)
        key, query = k[:, :, None, t, :, None], q[:, :, None, t, :, None]
        known = key.mT @ state if is_delta else 0.0
        state = state + key @ ((v[..., t, None, :] - known) * rate[..., t, None, None])
        outputs.append(query.mT @ state)
    return torch.cat(outputs, dim=-2), state


def arguments(num_tokens, decay=1.0, dtype=torch.float64, per_key=()):
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = (F.normalize(normal(B, G, num_tokens, D), dim=-1) for _ in range(2))
    v = normal(B, G, R, num_tokens, E)
    decays, rates = (
        -decay * normal(B, G, R, num_tokens, *per_key).exp(),
        normal(B, G, R, num_tokens).sigmoid(),
    )
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


@KINDS
@DECAYS
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 11, 16])
def test_chunks_are_the_recurrence(num_tokens, has_documents, per_key, is_delta):
    inputs, starts = arguments(num_tokens, per_key=per_key), starts_of(num_tokens) if has_documents else None
    found = chunked_recurrence(*inputs, starts, chunk=4, is_delta=is_delta)
    assert_same(found, recurrence(*inputs, starts, is_delta=is_delta), inputs)


@KINDS
@DECAYS
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_the_state_goes_on(num_tokens, per_key, is_delta):
    inputs = arguments(num_tokens, per_key=per_key)
    state = torch.randn(B, G, R, D, E, dtype=torch.float64).requires_grad_()
    found = chunked_recurrence(*inputs, state=state, chunk=4, is_delta=is_delta)
    assert_same(found, recurrence(*inputs, state=state, is_delta=is_delta), [*inputs, state])


@KINDS
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("cut", [1, 6, 8, 20])
def test_pieces_are_the_whole(cut, has_documents, is_delta):
    """A document that starts in an earlier piece has a negative start."""
    inputs, starts = arguments(21), starts_of(21) if has_documents else None
    outputs, state = [], None
    for first, last in ((0, cut), (cut, 21)):
        q, k, v = (each[..., first:last, :] for each in inputs[:3])
        decay, rate = (each[..., first:last] for each in inputs[3:])
        own = None if starts is None else starts[:, first:last] - first
        y, state = chunked_recurrence(q, k, v, decay, rate, own, state, chunk=4, is_delta=is_delta)
        outputs.append(y)
    expected = chunked_recurrence(*inputs, starts, chunk=4, is_delta=is_delta)
    torch.testing.assert_close((torch.cat(outputs, dim=-2), state), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_space_is_that_of_transformers(dtype):
    q, k, v = (each.detach() for each in arguments(37, dtype=dtype)[:3])
    rate, slopes = arguments(37)[4].detach().float(), -torch.rand(G, R)
    found, _ = chunked_recurrence(q, k, v, rate * slopes[..., None], rate, chunk=8, is_delta=False)
    x, dt = (each.movedim(3, 1).flatten(2, 3) for each in (v, rate))
    expected = mamba2_chunk_scan(
        x, dt.to(dtype), slopes.flatten(), *(each.transpose(1, 2) for each in (k, q)), chunk_size=8
    )
    assert found.dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # of dt
    torch.testing.assert_close(found.movedim(3, 1).flatten(2, 3), expected.float(), rtol=0, atol=tolerance)


@KINDS
@pytest.mark.parametrize("size", [2**7, 2**11])
def test_large_decays_and_document_starts_stay_finite(size, is_delta):
    inputs = arguments(70, decay=size)
    found = chunked_recurrence(*(each.float() for each in inputs), starts_of(70), is_delta=is_delta)
    gradients = torch.autograd.grad(sum(each.sum() for each in found), inputs)
    assert all(each.isfinite().all() for each in (*found, *gradients))
