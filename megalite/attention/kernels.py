"""Kernels of attention, each with the same interface: PyTorch's, ours in Triton, and FlexAttention.

`plain` has attention in plain PyTorch with the same interface. A kernel computes attention of some queries
with some keys. The softmax is over these keys alone, and the logarithm of each query's sum of exponentials
(lse, `log_sums`) says what share they have in the whole. Results with different keys are therefore merged
exactly (Milakov and Gimelshein 2018), and other terms of the sum are added last.

Shapes: b microbatch, n query heads, g key/value heads, m queries and e keys of a block, s keys of the sample,
d head size, d' size of values. A rank has t queries, and u keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from megalite.attention.positions import distance_bias, local_slopes
from megalite.config import ModelConfig
from megalite.kernels import CausalSoftmax, VisibleKeys, flash_attention
from megalite.kernels.flash_attention import operands
from megalite.kernels.packed_heads import gradients_of
from megalite.kernels.softmax import finish_, parameter_gradient, share_of_keys
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils import torch_private

LEAST = -1e30
"""Smallest logarithm of a sum, instead of the -inf of a query without keys: -inf - -inf is no number."""


class Block(NamedTuple):
    """Positions of queries and keys in the sample: consecutive ones, unless slices are joined.

    Positions between two joined slices are those of other ranks.
    """

    queries: range
    keys: range

    @staticmethod
    def around(queries: Sequence[range], keys: Sequence[range]) -> Block:
        """Return the block from the first to the last position of some slices, in their order."""
        return Block(*(range(runs[0].start, runs[-1].stop) for runs in (queries, keys)))

    def seen(self, softmax: CausalSoftmax) -> range:
        """Return the keys that some query may see, as far as the host knows: documents do not narrow it."""
        visible, keys = softmax.visible, self.keys
        first = keys.start if visible.window is None else self.queries.start - visible.window
        last = keys.stop if visible.ends is not None else self.queries.stop
        return range(max(keys.start, first), max(keys.start, first, min(keys.stop, last)))

    def rows_in(self, block: Block) -> slice:
        """Return the slice of another block's queries that are this block's."""
        first = block.queries.start
        return slice(self.queries.start - first, self.queries.stop - first)

    def columns_in(self, block: Block, softmax: CausalSoftmax) -> tuple[range, slice]:
        """Return the keys that some query may see, and their slice of another block's keys."""
        seen, first = self.seen(softmax), block.keys.start
        return seen, slice(seen.start - first, seen.stop - first)


def merge_(out: Tensor, log_sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Merge attention of the same queries with other keys into `out` and `log_sums`."""
    total = torch.logaddexp(log_sums, more_sums)
    finite = total.clamp(min=LEAST)  # of queries that see no key in both blocks
    out.mul_((log_sums - finite).exp_()[..., None]).addcmul_(more, (more_sums - finite).exp_()[..., None])
    log_sums.copy_(total)


def attend_slices(
    q: Tensor,
    softmax: CausalSoftmax,
    runs: Sequence[range] | None,
    attend: Callable[[Tensor, CausalSoftmax], Tensor],
) -> Tensor:
    """Compute attention of the queries ``[b, n, t, d]``, one slice after another if they are slices.

    Args:
        runs: positions of the slices; None if the queries are consecutive.
        attend: maps consecutive queries, the first of which is at `VisibleKeys.first`, to their output.
    """
    if runs is None:
        return attend(q, softmax)
    slices = zip(q.split([len(run) for run in runs], dim=2), runs, strict=True)
    visible = softmax.visible
    outs = (attend(x, softmax._replace(visible=visible._replace(first=run.start))) for x, run in slices)
    return torch.cat([x.permute(2, 0, 1, 3) for x in outs]).permute(1, 2, 0, 3)  # tokens outermost


class Computation(Protocol):
    """Declares the interface of attention of queries with all keys that they see, without autograd.

    Attributes:
        softmax: scale, bias, visible keys, dropout and parameters.
        keeps_output: whether `backward` needs the output.
    """

    @property
    def softmax(self) -> CausalSoftmax: ...

    @property
    def keeps_output(self) -> bool: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output ``[b, n, t, d']`` and the logarithms of the sums over keys, at least fp32.

        Args:
            q, k, v: ``[b, n, t, d]``, ``[b, g, u, d]`` and ``[b, g, u, d']``.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            grad: gradient of the output.
            out, log_sums: the results of the whole softmax; the output is None if not `keeps_output`.
        """


def differentiable(q: Tensor, k: Tensor, v: Tensor, computation: Computation) -> Tensor:
    """Compute attention by the whole softmax, ``[b, n, t, d']``."""
    out: Tensor = _Attention.apply(q, k, v, computation, *computation.softmax.parameters)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, computation: Computation, *parameters: Tensor
    ) -> Tensor:
        out, log_sums = computation.forward(q, k, v)
        finish_(out, log_sums, *parameters)
        out = out.to(q.dtype)
        keeps_output = computation.keeps_output or any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(q, k, v, out if keeps_output else None, log_sums, *parameters)
        ctx.computation = computation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, out, log_sums, *parameters) = grads, ctx.saved_tensors
        of_parameters = [
            parameter_gradient(grad, out, log_sums, parameter) if is_needed else None
            for parameter, is_needed in zip(parameters, ctx.needs_input_grad[4:], strict=True)
        ]
        return *ctx.computation.backward(grad, q, k, v, out, log_sums), None, *of_parameters


class MergedAttention(NamedTuple):
    """Results of a block's queries by the whole softmax, which the block's backward needs.

    Attributes:
        grad: gradient of the output, ``[b, n, m, d']``.
        out: the output, ``[b, n, m, d']``.
        log_sums: logarithms of the sums, ``[b, n, m]``.
        deltas: sums of the output times its gradient, ``[b, n, m]``.
    """

    grad: Tensor
    out: Tensor
    log_sums: Tensor
    deltas: Tensor

    def rows(self, rows: slice) -> MergedAttention:
        """Return the results of some of the queries."""
        return MergedAttention(*(x[:, :, rows] for x in self))


class Kernel(ABC):
    """Functions that compute attention in one way, for layers with the same context.

    Attributes:
        attends_slices: whether `attend` takes some slices of the queries.
    """

    attends_slices = False

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        self.config, self.context = config, context

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys in the representation that the kernel computes with."""
        return visible

    def exclude_from_graphs(self) -> None:  # noqa: B027
        """Exclude the kernel from the graphs of compiled layers, if it cannot be compiled in them."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: CausalSoftmax,
        largest: Tensor | None = None,
        runs: Sequence[range] | None = None,
    ) -> Tensor:
        """Map ``[b, n, m, d]``, ``[b, g, s, d]`` and ``[b, g, s, d']`` to ``[b, n, m, d']``, differentiably.

        Args:
            softmax: scale, bias, visible keys, dropout and parameters.
            largest: largest scaled score of each head so far, ``[n]``, which is raised in place; None to skip
                it.
            runs: positions of the slices of which the queries consist; None if they are those of all keys.
        """


class BlockKernel(Kernel):
    """Functions of a kernel that also computes blocks of queries and keys, and returns the sums' logarithms.

    Attributes:
        joins_slices: whether a block has all queries and keys of a step, instead of one slice of each. This
            is for causal attention without other masks: either no key of the block is later than a query,
            or queries and keys are the same tokens in their order.
    """

    joins_slices = False

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[b, n, m, d']`` and the logarithms of the sums ``[b, n, m]`` in at least fp32.

        A query that sees no key of the block has an output of 0, and a logarithm of -inf.

        Args:
            q, k, v: ``[b, n, m, d]``, ``[b, g, e, d]`` and ``[b, g, e, d']``.
            softmax: bias, visible keys and dropout, by positions in the whole sample.
        """

    @abstractmethod
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; the other arguments are those of `forward`.

        Args:
            whole: attention of these queries with all keys.
        """


class SdpaKernel(BlockKernel):
    """Calls of scaled_dot_product_attention, without dropout: its masks would depend on the layout.

    ALiBi, documents and windows are passed as a bias ``[b or 1, n or 1, m, s]``; layers of a kind share it.
    Only FlashAttention computes blocks. These have no windows, ALiBi or caps, and tokens of one document. In
    samples of one document, one call computes all blocks of a step.

    Args:
        kernels: kernels that it may use, the preferred one first; by default any kernel.
    """

    joins_slices = True

    def __init__(self, config: ModelConfig, context: LayerContext, *kernels: SDPBackend) -> None:
        super().__init__(config, context)
        self.has_bias = config.position_embedding_type == "alibi"
        self._distances: dict[int, Tensor] = {}
        self.kernels: Callable[[], AbstractContextManager[Any]] = (
            partial(sdpa_kernel, list(kernels), set_priority=True) if kernels else nullcontext
        )

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys as a bias, unless they are those of all queries in causal attention."""
        if self.context.ring is not None or self.context.gathers_keys:
            return visible  # attention is computed in blocks
        is_causal = visible.starts is None and visible.ends is None
        if is_causal and not self.has_bias:
            return visible
        return VisibleKeys(bias=self.bias(visible, s, range(s)))

    def bias(self, visible: VisibleKeys, s: int, queries: range) -> Tensor:
        """Return the bias of these queries, ``[b or 1, n or 1, m, s]``."""
        hidden = visible.hidden(queries, range(s), self.context.device)
        return self._distance_bias(s, queries).masked_fill(hidden[:, None], -torch.inf)

    def _distance_bias(self, s: int, queries: range) -> Tensor:
        if not self.context.has_documents:  # the bias itself is a table
            return distance_bias(self.config, self.context, s, queries)
        if s not in self._distances:
            self._distances[s] = distance_bias(self.config, self.context, s, range(s))
        return self._distances[s][:, queries.start : queries.stop]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: CausalSoftmax,
        largest: Tensor | None = None,
        runs: Sequence[range] | None = None,
    ) -> Tensor:
        """Compute attention; see `Kernel`."""
        assert softmax.drop is None or softmax.drop.p == 0.0, "this kernel has no dropout"
        assert not softmax.parameters and largest is None, "this kernel returns no sums or largest scores"
        bias = softmax.visible.bias
        with self.kernels():
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                is_causal=bias is None and q.shape[2] > 1,  # one query may see a cache of keys
                scale=softmax.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Compute a block; see `BlockKernel`."""
        is_causal, wide = block.queries == block.keys, torch.promote_types(q.dtype, torch.float32)
        is_cpu = q.device.type == "cpu"
        attention = torch_private.cpu_attention if is_cpu else torch_private.flash_attention
        out, log_sums, *_ = attention(q, k, v, 0.0, is_causal, scale=softmax.scale)
        return out.to(wide), log_sums.to(wide)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a block, in the dtype of `q`; see `BlockKernel`."""
        grad, out, log_sums, _ = whole
        is_causal, scale = block.queries == block.keys, softmax.scale
        arguments = grad, q, k, v, out, log_sums.contiguous()
        if q.device.type == "cpu":
            return torch_private.cpu_attention_backward(*arguments, 0.0, is_causal, scale=scale)
        # The empty tensors are of samples without padding, and the state of a dropout that is off.
        none, state = q.new_empty(0, dtype=torch.int32), q.new_zeros(2, dtype=torch.uint64)
        lengths = none, none, q.shape[2], k.shape[2]
        return torch_private.flash_attention_backward(
            *arguments, *lengths, 0.0, is_causal, state, q.new_zeros(()), scale=scale
        )


class TritonKernel(BlockKernel):
    """Calls of our Triton kernels: all masks, biases and softmax parameters, and dropout, on a GPU.

    Values of another size than keys are padded with zeros, or the keys are.
    """

    attends_slices = True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: CausalSoftmax,
        largest: Tensor | None = None,
        runs: Sequence[range] | None = None,
    ) -> Tensor:
        """Compute attention; see `Kernel`."""
        assert largest is None, "this kernel does not return largest scores"
        size = v.shape[3]
        q, k, v = _of_one_size(q, k, v)
        out = attend_slices(q, softmax, runs, lambda rows, part: flash_attention(rows, k, v, part))
        return out if size == out.shape[3] else out[..., :size]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Compute a block; see `BlockKernel`."""
        size = v.shape[3]
        q, k, v = _of_one_size(q, k, v)
        rest = operands(softmax, block.queries.start, block.keys.start)
        out, log_sums = torch.ops.megalite.flash_attention(q, k, v, *rest)
        return out[..., :size].to(log_sums.dtype), log_sums

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a block, in the dtype of `q`; see `BlockKernel`."""
        grad, out, queries, keys, values = _of_one_size(whole.grad, whole.out, q, k, v)
        operator = torch.ops.megalite.flash_attention_backward
        rest = operands(softmax, block.queries.start, block.keys.start)
        grad_q, grad_k, grad_v = gradients_of(
            operator(grad, queries, keys, values, out, whole.log_sums.contiguous(), *rest)
        )
        return grad_q[..., : q.shape[3]], grad_k[..., : k.shape[3]], grad_v[..., : v.shape[3]]


def _of_one_size(*heads: Tensor) -> list[Tensor]:
    """Return heads ``[b, n, m, d]`` padded with zeros to the largest size."""
    size = max(x.shape[3] for x in heads)
    return [x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3])) for x in heads]


class FlexKernel(Kernel):
    """Calls of a kernel that torch.compile generates for the model's positions and documents (FlexAttention).

    ALiBi, capped scores and documents are inside the kernel, without a bias in memory. It was not measured:
    backward requires a GPU (torch 2.13), and we had none.

    Args:
        compiled: replacement for the compiled `flex_attention`, for tests on a CPU.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, compiled: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(config, context)
        self.compiled: Callable[..., Any] = compiled or torch.compile(torch_flex_attention, dynamic=False)
        self.score_mod = self._capped(
            config.attn_logit_softcapping, self._alibi(local_slopes(config, context))
        )

    def _alibi(self, slopes: Tensor | None) -> Callable[..., Tensor] | None:
        if slopes is None:
            return None
        head_slopes = slopes.float()

        def bias(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + head_slopes[head] * (key - query)

        return bias

    def _capped(self, cap: float | None, bias: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
        if cap is None:
            return bias

        def capped(score: Tensor, *place: Tensor) -> Tensor:
            score = cap * torch.tanh(score / cap)
            return score if bias is None else bias(score, *place)

        return capped

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys as the blocks of keys that each block of queries sees."""
        starts, ends = visible.starts, visible.ends
        num_samples = 1 if starts is None else len(starts)

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            sample = b if num_samples > 1 else 0
            is_before = key <= query if ends is None else key < ends[sample, query]
            return is_before if starts is None else is_before & (key >= starts[sample, query])

        of_samples = num_samples if num_samples > 1 else None
        return VisibleKeys(blocks=create_block_mask(sees, of_samples, None, s, s, device=self.context.device))

    def exclude_from_graphs(self) -> None:
        """Compute attention in a graph of its own."""
        # The kernel is a separate graph: inside a layer's graph, after a rotary embedding, its forward
        # computed wrong numbers (torch 2.13 on a CPU).
        self.compiled = torch.compiler.disable(self.compiled, recursive=False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: CausalSoftmax,
        largest: Tensor | None = None,
        runs: Sequence[range] | None = None,
    ) -> Tensor:
        """Compute attention; see `Kernel`."""
        assert softmax.drop is None or softmax.drop.p == 0.0, "this kernel has no dropout"
        found = self.compiled(
            q,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=softmax.visible.blocks,
            scale=softmax.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True) if softmax.parameters else None,
        )
        if not softmax.parameters:
            return found
        out, aux = found
        return (out * share_of_keys(aux.lse, *softmax.parameters)).to(q.dtype)
