"""Mamba-2's state-space model in chunks: quadratic within a chunk, recurrent between them.

(Dao and Gu 2024, arXiv 2405.21060, section 6.) In each head, with a state ``S[p, n]`` that starts at zero:

    S_t = exp(dt_t a) S_(t-1) + dt_t x_t B_t^T
    y_t = S_t C_t

Shapes: s sequence, b microbatch, g groups of this rank, r heads of a group, p head size, n state size,
l tokens of a chunk, m chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import recurrence

CHUNK_SIZE = 64
"""Tokens of a chunk. Within a chunk, backward keeps a weight for each pair of tokens and head."""


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    of_input: Tensor,
    of_output: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Return y, ``[s, b, g, r, p]``, and the state after the last token, ``[b, g, r, p, n]``.

    All sums are in at least fp32, and so are the results.

    Args:
        x: ``[s, b, g, r, p]``.
        dt: time steps, ``[s, b, g, r]``.
        a: negative rates of decay, ``[g, r]``.
        of_input: B, ``[s, b, g, n]``; all heads of a group share it.
        of_output: C, ``[s, b, g, n]``.
        starts: index in x of the first token of each token's document, at which the state is zero again,
            ``[b, s]``; negative for a document that starts before x. None if each sample is one document.
        state: state before the first token; None for zeros.
        chunk_size: l.
    """
    num_tokens, size = x.shape[0], min(chunk_size, x.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, of_input, of_output = (_in_chunks(each.to(wide), size) for each in (x, dt, of_input, of_output))
    decay = (dt * a.to(wide)).permute(0, 1, 3, 4, 2).cumsum(-1)  # [b, m, g, r, l], up to each token
    x = x * dt.unsqueeze(-1)
    first = torch.arange(x.shape[1], device=x.device) * size  # [m], index of each chunk's first token
    if starts is not None:  # [b, m, l]
        padding = x.shape[1] * size - num_tokens
        starts = torch.cat((starts, starts[:, -1:].expand(-1, padding)), dim=1).unflatten(1, (-1, size))

    y = _within_chunks(x, decay, of_input, of_output, starts)
    own = _own_states(x, decay, of_input, starts)
    states = _pass_states(own, decay[..., -1], state, starts, first)  # [b, m + 1, g, r, p, n]
    from_before = torch.einsum("bmlgn,bmgrpn->bmlgrp", of_output, states[:, :-1])
    y = y + from_before * _seen_factors(decay, starts, first).permute(0, 1, 4, 2, 3).unsqueeze(-1)
    return y.flatten(1, 2).transpose(0, 1)[:num_tokens], states[:, -1]


def fused_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    of_input: Tensor,
    of_output: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what `scan` computes by the operator `recurrence`, which multiplies in the precision of x."""
    rate = dt.permute(1, 2, 3, 0)  # [b, g, r, s]
    k, q = (each.permute(1, 2, 0, 3) for each in (of_input, of_output))  # [b, g, s, n]
    before = None if state is None else state.mT
    v, decay = x.permute(1, 2, 3, 0, 4), rate * a.unsqueeze(-1)
    y, state = recurrence(q, k, v, decay, rate, starts, before, is_delta=False)
    return y.permute(3, 0, 1, 2, 4), state.mT


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Map ``[s, b, ...]`` to ``[b, m, l, ...]``, filled up with zeros: a time step of 0 changes no state."""
    padding = (0, 0) * (x.dim() - 1) + (0, -x.shape[0] % size)
    return F.pad(x, padding).transpose(0, 1).unflatten(1, (-1, size))


def _within_chunks(
    x: Tensor, decay: Tensor, of_input: Tensor, of_output: Tensor, starts: Tensor | None
) -> Tensor:
    """Return what tokens of a chunk add to the outputs of its tokens, ``[b, m, l, g, r, p]``."""
    size = x.shape[2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    if starts is not None:
        hidden = (hidden | (starts.unsqueeze(-1) != starts.unsqueeze(-2)))[:, :, None, None]
    exponents = decay.unsqueeze(-1) - decay.unsqueeze(-2)  # [b, m, g, r, l, l]
    weights = exponents.masked_fill(hidden, -torch.inf).exp()
    scores = torch.einsum("bmlgn,bmkgn->bmglk", of_output, of_input)
    return torch.einsum("bmgrlk,bmkgrp->bmlgrp", weights * scores.unsqueeze(3), x)


def _own_states(x: Tensor, decay: Tensor, of_input: Tensor, starts: Tensor | None) -> Tensor:
    """Return what the tokens of each chunk add to the state after it, ``[b, m, g, r, p, n]``."""
    to_end = (decay[..., -1:] - decay).exp()  # [b, m, g, r, l]
    if starts is not None:
        to_end = to_end * (starts == starts[..., -1:])[:, :, None, None]
    weighted = x * to_end.permute(0, 1, 4, 2, 3).unsqueeze(-1)
    return torch.einsum("bmlgn,bmlgrp->bmgrpn", of_input, weighted)


def _pass_states(
    own: Tensor, decay: Tensor, state: Tensor | None, starts: Tensor | None, first: Tensor
) -> Tensor:
    """Return the states before the first chunk and after each one, ``[b, m + 1, g, r, p, n]``.

    Args:
        own: what each chunk adds.
        decay: exponent of each chunk's decay, ``[b, m, g, r]``.
        state: state before the first chunk; None for zeros.
    """
    before = torch.zeros_like(own[:, :1]) if state is None else state.to(own.dtype).unsqueeze(1)
    exponents = _segment_sums(F.pad(decay.permute(0, 2, 3, 1), (1, 0)))  # [b, g, r, m + 1, m + 1]
    hidden = torch.ones(exponents.shape[-2:], dtype=torch.bool, device=own.device).triu(1)
    if starts is not None:
        # The state after a chunk has nothing of an earlier one that ends before the document's start.
        last_starts = F.pad(starts[..., -1], (1, 0))  # [b, m + 1]
        ends = F.pad(first, (0, 1), value=first.numel() * starts.shape[-1])  # [m + 1], of what came before
        is_earlier = torch.ones_like(hidden).tril(-1)
        ended = is_earlier & (last_starts.unsqueeze(-1) >= ends)  # [b, m + 1, m + 1]
        hidden = (hidden | ended)[:, None, None]
    factors = exponents.masked_fill(hidden, -torch.inf).exp()
    return torch.einsum("bgrez,bzgrpn->begrpn", factors, torch.cat((before, own), dim=1))


def _segment_sums(x: Tensor) -> Tensor:
    """Return the sums of the elements after j up to i, ``[..., n]`` to ``[..., n, n]``; 0 for j >= i.

    They are summed, and not differences of sums from the start, which would round to the whole sum's bits.
    """
    size = x.shape[-1]
    after = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(-1)
    return x.unsqueeze(-1).expand(*x.shape, size).masked_fill(~after, 0.0).cumsum(-2)


def _seen_factors(decay: Tensor, starts: Tensor | None, first: Tensor) -> Tensor:
    """Return the factor of the state before a chunk in the outputs of its tokens, ``[b, m, g, r, l]``."""
    factors = decay.exp()
    if starts is None:
        return factors
    return factors * (starts < first.unsqueeze(-1))[:, :, None, None]
