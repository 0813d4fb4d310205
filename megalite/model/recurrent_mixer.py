"""The base class of recurrent mixers, their convolution, also as a mixer alone, and recurrences by chunks.

`chunked_recurrence` computes what `megalite.kernels.recurrence` computes in plain PyTorch, chunk by chunk. A
token writes k u^T to the state S, after its decay. With the delta rule, the changes u = rate (v - S^T k) of a
chunk's tokens solve one triangular system, since each depends on those before it (Yang et al. 2024, arXiv
2412.06464); otherwise u = rate v (Dao and Gu 2024, arXiv 2405.21060, section 6). Only the state at a chunk's
start is computed one chunk after the other.

Shapes: s sequence, b microbatch, h hidden size, c features of a tensor-parallel rank, c' those of its heads
whose recurrence this rank computes, k tokens that the convolution sees, tp = tp.size. With context
parallelism, s is the tokens of a rank outside of the recurrence. In `chunked_recurrence`, b samples, g query
and key heads of this rank, r value heads that share one, s tokens, d size of a key head, e size of a value
head, m chunks, c tokens of a chunk. In `GatedConvolution`, h' are the channels that this rank computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.attention.core import HeadExchange, StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig, RecomputeConfig
from megalite.config.model.recurrence import GatedConvolutionSpec
from megalite.data.microbatch import BlockOutput, SampleNumbers
from megalite.model.recompute_region import recompute_core, recompute_output
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.utils.wrapping import communication_point, wrap, wrap_point


class RecurrentMixer(nn.Module, ABC):
    """Computes projection(recur(in_projection(x))); a subclass makes the projections and computes `recur`.

    The rows of the fused input projection are grouped by what a head shares, so that a rank's heads with all
    that belongs to them are one plain slice.

    Attributes:
        kernel_problem: why plain PyTorch computes the recurrence; empty if GPU kernels do.
    """

    kernel_problem: str
    in_projection: ColumnParallelLinear
    projection: RowParallelLinear

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.exchange = HeadExchange(context)

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the recurrence between the projections, and the norm of the input."""
        if "core_attn" in config.modules:
            wrap(self, "recur", recompute_core)
        if "layernorm" in config.modules:
            recompute_output(norm, "forward", self, "project_in")

    def forward(self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        projected = self.project_in(x, positions)
        y = self.keep_own_tokens(self.recur(projected, positions), positions)
        return BlockOutput(self.projection(y), self.projection.bias)

    @communication_point
    def project_in(self, x: Tensor, positions: PositionInfo) -> Tensor:
        """Map ``[s, b, h]`` to the features of this rank's heads for all tokens, ``[s, b, c']``."""
        return self.exchange.to_heads(self.in_projection(x), positions)

    @communication_point
    def keep_own_tokens(self, y: Tensor, positions: PositionInfo) -> Tensor:
        """Return all heads of this rank's tokens, ``[s, b, c]``, of the result of `recur`."""
        return self.exchange.to_tokens(y, positions)

    @abstractmethod
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute the output's features from ``[s, b, c']``, with all tokens; a wrap point."""


class ShortConvolution(nn.Module):
    """Computes f(sum_i weight_i * x[t - k + 1 + i] + bias) for each channel; tp cuts the channels.

    A channel mixes a token with the few tokens before it. A rank computes the channels of its heads. Tokens
    before the start of a document count as zeros. The sums are in at least fp32, and backward keeps x in its
    own dtype.

    Args:
        channels: channels of all ranks.
        kernel: k.
        bias: add a bias to each channel, which starts at zero.
        function: f.
    """

    def __init__(
        self,
        channels: int,
        kernel: int,
        std: float,
        context: LayerContext,
        *,
        bias: bool = False,
        function: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.function = function
        self.exchange = HeadExchange(context)
        cut = Cut("tp", 0)
        spec = ParameterSpec((channels, kernel), cut, std=std, maps_features=False)
        self.weight = new_parameter(spec, context)  # [channels/tp, k]
        self.bias = (
            new_parameter(ParameterSpec((channels,), cut, decay=False), context) if bias else None
        )  # [channels/tp]

    def forward(
        self, x: Tensor, starts: Tensor | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mix the tokens ``[s, b, c']``.

        Args:
            starts: see `PositionInfo`.
            before: inputs before x, ``[b, k - 1, c']``; by default zeros.

        Returns:
            The result, ``[s, b, c']``, and a view of the last inputs, ``[b, k - 1, c']``.
        """
        own, wide = self.exchange.own, torch.promote_types(x.dtype, torch.float32)
        weight = own(self.weight).to(wide)  # [c', k]
        num_tokens, past = x.shape[0], weight.shape[1] - 1
        if before is None:
            before = x.new_zeros(x.shape[1], past, x.shape[2])
        padded = torch.cat((before.transpose(0, 1), x))  # [k - 1 + s, b, c']
        y = x * weight[:, past]
        for distance in range(1, past + 1):
            shifted = padded[past - distance : past - distance + num_tokens]
            product = shifted * weight[:, past - distance]
            if starts is not None:
                product = product.where(is_within(starts, distance), 0.0)
            y = y + product
        if self.bias is not None:
            y = y + own(self.bias).to(wide)
        return self.function(y).to(x.dtype), padded[num_tokens:].transpose(0, 1)


def is_within(starts: Tensor, distance: int) -> Tensor:
    """Return which tokens have a token of their document at a distance before them, ``[s, b, 1]``."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    return (positions - distance >= starts).t().unsqueeze(-1)


CHUNK = 64
"""Tokens of a chunk, of which every pair is compared."""


def chunked_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    *,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, ``[b, g, r, s, e]``, and the last state, ``[b, g, r, d, e]``, in at least fp32.

    Args:
        q, k, v, decay, rate, starts, state, is_delta: see `megalite.kernels.recurrence`. The decay may also
            be of each element of keys, ``[b, g, r, s, d]``.
        chunk: tokens of a chunk.
    """
    num_tokens = q.shape[-2]
    q, k, v = (each.to(decay.dtype) for each in (q, k, v))
    size = min(chunk, num_tokens)
    q, k, v = (_in_chunks(each, size, dim=-2) for each in (q, k, v))  # [b, g, m, c, d], [b, g, r, m, c, e]
    q, k = q.unsqueeze(2), k.unsqueeze(2)  # [b, g, 1, m, c, d]
    decay = decay.unsqueeze(-1) if decay.dim() == rate.dim() else decay
    decay, rate = _in_chunks(decay, size, dim=-2), _in_chunks(rate, size, dim=-1)  # [b, g, r, m, c, 1 or d]
    total = decay.cumsum(-2)
    sees_tokens, sees_state = _sees(starts, size, num_tokens, q.device)
    # Masked before exp: after it, the factors of later tokens could be infinite.
    later, earlier = total.unsqueeze(-2), total.unsqueeze(-3)
    between = (later - earlier).masked_fill(~sees_tokens.unsqueeze(-1), -torch.inf).exp()
    since_start = total.exp() * sees_state.unsqueeze(-1)  # [b, g, r, m, c, 1 or d]
    to_end = between[..., -1, :, :]

    changes, of_state = v * rate.unsqueeze(-1), None
    if is_delta:
        system = rate.unsqueeze(-1) * _pairs(k, k, between)  # the diagonal counts as 1
        rated = torch.cat((changes, k * (rate.unsqueeze(-1) * since_start)), dim=-1)
        solved = torch.linalg.solve_triangular(system, rated, upper=False, unitriangular=True)
        changes, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = _pairs(q, k, between)
    reads, writes = q * since_start, k * to_end
    kept = since_start[..., -1, :, None]  # [b, g, r, m, 1 or d, 1]

    if state is None:
        state = v.new_zeros(*changes.shape[:3], k.shape[-1], v.shape[-1])
    changes, states, last = _Scan.apply(changes, of_state, writes, kept, state)
    outputs = reads @ states + scores @ changes
    return outputs.flatten(-3, -2)[..., :num_tokens, :], last


def _pairs(q: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """Return the products of pairs of a chunk's tokens times what is left of them, ``[b, g, r, m, c, c]``.

    Args:
        between: factors, ``[b, g, r, m, c, c, 1 or d]``.
    """
    if between.shape[-1] == 1:
        return (q @ k.mT) * between.squeeze(-1)
    # Not a GEMM of q and k times powers of their own: these would overflow.
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * between).sum(-1)


class _Scan(torch.autograd.Function):
    """Computes the chunks' states one after the other: all that depends on the chunk before.

    Forward returns the changes, of which it subtracts what a chunk's first state makes of them; the states at
    the chunks' starts, ``[b, g, r, m, d, e]``; and the last state. Backward keeps two matrices of each chunk,
    where autograd would keep the operands of each step.

    Args of forward:
        changes: changes for a state of zeros, ``[b, g, r, m, c, e]``.
        of_state: what the state subtracts from them, ``[b, g, r, m, c, d]``; None without the delta rule.
        writes: keys that add them to the next chunk's state, ``[b, g, r, m, c, d]``.
        kept: factor of the state from chunk to chunk, ``[b, g, r, m, 1 or d, 1]``.
        state: ``[b, g, r, d, e]``.
    """

    @staticmethod
    def forward(
        ctx: Any, changes: Tensor, of_state: Tensor | None, writes: Tensor, kept: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        results, states = [], []
        for i in range(changes.shape[3]):
            change = changes[:, :, :, i]
            if of_state is not None:
                change = change - of_state[:, :, :, i] @ state
            results.append(change)
            states.append(state)
            state = state * kept[:, :, :, i] + writes[:, :, :, i].mT @ change
        result, starts = torch.stack(results, dim=3), torch.stack(states, dim=3)
        ctx.save_for_backward(result, starts, of_state, writes, kept)
        return result, starts, state.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        changes, states, of_state, writes, kept = ctx.saved_tensors
        grad_changes, grad_states, grad = grads
        of_changes, of_ends = [], []
        for i in reversed(range(changes.shape[3])):
            of_change = grad_changes[:, :, :, i] + writes[:, :, :, i] @ grad
            of_changes.append(of_change)
            of_ends.append(grad)
            grad = grad * kept[:, :, :, i] + grad_states[:, :, :, i]
            if of_state is not None:
                grad = grad - of_state[:, :, :, i].mT @ of_change
        of_change, of_end = (torch.stack(each[::-1], dim=3) for each in (of_changes, of_ends))
        of_weight = None if of_state is None else -of_change @ states.mT
        of_factor = (of_end * states).sum_to_size(kept.shape)
        return of_change, of_weight, changes @ of_end.mT, of_factor, grad


def _sees(starts: Tensor | None, size: int, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which of a chunk's tokens, and whether the state at its start, a token sees.

    They are ``[b or 1, 1, 1, m or 1, c, c]`` and ``[b or 1, 1, 1, m or 1, c]``. A token sees the tokens of
    its document up to its own.

    Args:
        size: tokens of a chunk.
    """
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if starts is None:
        return causal, causal.new_ones(size)
    missing = -num_tokens % size
    starts = torch.cat((starts, starts[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, size))
    positions = torch.arange(num_tokens + missing, device=device).view(-1, size)  # [m, c]
    tokens = causal & (positions[:, None, :] >= starts.unsqueeze(-1))  # [b, m, c, c]
    return tokens[:, None, None], (starts < positions[:, :1])[:, None, None]


def _in_chunks(x: Tensor, size: int, dim: int) -> Tensor:
    """Cut the tokens along a negative dim into chunks; zeros, which change no state, fill up the last one."""
    missing = -x.shape[dim] % size
    padded = F.pad(x, (*(0, 0) * (-1 - dim), 0, missing)) if missing else x
    return padded.unflatten(dim, (-1, size))


class GatedConvolution(RecurrentMixer):
    """Computes projection(c * convolution(b * x)), where b, c and x are projections of the input; no bias.

    Its only state is its last inputs (LFM2: arXiv 2511.23404).
    """

    kernel_problem = "a convolution"

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        core: StageCore,
        layer: int,
        spec: GatedConvolutionSpec,
    ) -> None:
        super().__init__(context)
        self.spec, self.saved = spec, core.recurrent_state(layer)
        h, std, rows = spec.width, config.init_method_std, spec.group_rows
        self.in_projection = ColumnParallelLinear(
            h, sum(rows) * h, context, bias=False, std=std, fused_rows=rows
        )
        self.convolution = ShortConvolution(h, spec.kernel, std, context, function=lambda y: y)
        self.projection = RowParallelLinear(
            h, h, context, bias=False, std=depth_scaled_std(std, config.num_blocks)
        )

    @wrap_point
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute c * convolution(b * x), ``[s, b, h']``.

        Args:
            projected: b, c and x of each channel, ``[s, b, 3 h']``.
        """
        before, after, x = projected.unflatten(-1, (-1, len(self.spec.group_rows))).unbind(-1)
        saved = self.saved
        y, inputs = self.convolution(
            before * x, positions.document_starts, None if saved is None else saved.inputs
        )
        if saved is not None:
            saved.keep(inputs)
        return after * y
