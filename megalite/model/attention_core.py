"""The attention core, softmax(scale q k^T + bias) v, that the layers of a stage share.

Shapes: s sequence, b microbatch, n query heads of this rank, g' its key/value heads, d head size. With
all-gathered keys of context parallelism, there are m = s/cp queries, and m = s otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config import LayerKind, ModelConfig
from megalite.kernels import (
    CausalSoftmax,
    Drop,
    VisibleKeys,
    add_sinks_,
    flash_attention,
    sinks_gradient,
)
from megalite.kernels.packed_heads import gradients_of
from megalite.kernels.visible_keys import document_starts
from megalite.microbatch import Microbatch
from megalite.model.blockwise_attention import Blocking, attend, attend_backward
from megalite.model.positions import (
    Angles,
    NoRotation,
    PositionInfo,
    Rotary,
    build_query_scale,
    build_rotations,
    distance_bias,
    local_slopes,
)
from megalite.model.recurrent_state import RecurrentState
from megalite.model.traced_attention import traced_attention
from megalite.tensor_parallel.parameter_spec import LayerContext


class LayerCore(Protocol):
    """Declares the interface of the attention core that one layer calls."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Map ``[b, n, m, d]``, ``[b, g', s, d]`` and ``[b, g', s, d']`` to ``[b, n, m, d']``.

        Args:
            visible: keys that each query sees, from `PositionInfo`.
            drop: dropout settings of the attention weights.
            sinks: ``[n]``, one more logit of each head in the softmax's sums; None without.
        """


class Core(Protocol):
    """Is the base class of the attention core of all layers of a stage.

    Attributes:
        choice: the backend and the reason for its choice, for the log.
        is_cached: whether it keeps the keys and values of earlier calls.
    """

    choice: str
    is_cached: bool

    @property
    def rotations(self) -> Mapping[bool, Callable[[Tensor, Angles | None], Tensor]]:
        """Return the functions that rotate queries and keys, by the `own_rotary` of a layer's kind."""

    def position_info(self, microbatch: Microbatch) -> PositionInfo: ...

    def prepare(self, seq_length: int) -> None: ...

    def tables(self) -> Iterable[Tensor]: ...

    def for_layer(self, layer: int, kind: LayerKind) -> LayerCore: ...

    def recurrent_state(self, layer: int) -> RecurrentState | None: ...


class StageCore(ABC):
    """Is the base class of the cores for training: all layers share one set of tables.

    Attributes:
        windows: windows of the layers that use the core.
    """

    choice = ""
    is_cached = False

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        self.config = config
        self.context = context
        self.query_scale = build_query_scale(config, context)
        self.windows: list[int | None] = []
        self.own_positions = context.topology.positions
        self._whole: dict[tuple[int, int | None], VisibleKeys] = {}

    @cached_property
    def rotations(self) -> Mapping[bool, Rotary | NoRotation]:
        """Return the rotary embeddings, by the `own_rotary` of a layer's kind."""
        return build_rotations(self.config, self.context)

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Return the positions of a microbatch's tokens, computed once for all layers."""
        ids, positions, own = microbatch.document_ids, microbatch.position_ids, self.own_positions
        b, s = microbatch.tokens.shape[0], microbatch.tokens.shape[1] * own.count
        angles: dict[bool, Angles | None] | None = None
        if positions is not None:
            angles = {kind: rotation.look_up(positions, s) for kind, rotation in self.rotations.items()}
        elif own.count > 1:
            angles = {kind: rotation.held_by(own, s) for kind, rotation in self.rotations.items()}
        factors = self.query_factors(s, positions)
        starts = document_starts(ids) if ids is not None and self.config.has_recurrent_layers else None
        return PositionInfo(self.visible_keys((b, s), ids, self.windows), angles, factors, starts)

    def query_factors(self, seq_length: int, position_ids: Tensor | None) -> Tensor | None:
        """Return the factors of this rank's queries of `PositionInfo`.

        Args:
            seq_length: tokens of a whole sample.
            position_ids: of this rank's tokens, ``[b, s / cp]``; None for positions within the sample.
        """
        if self.query_scale is None:
            return None
        if position_ids is None:
            return self.own_positions.take(self.query_scale.table(seq_length), dim=0)
        return self.query_scale.compute(position_ids)

    def visible_keys(
        self, shape: Sequence[int], document_ids: Tensor | None, windows: Iterable[int | None]
    ) -> dict[int | None, VisibleKeys]:
        """Return the keys that each query sees, by window.

        Args:
            shape: number of samples, and their length.
            document_ids: ``[b, s]``; None if each sample is one document.
            windows: windows of the layers; None for layers without one.
        """
        b, s = shape
        if document_ids is None:
            return {window: self.in_whole_sample(s, window).expand(b) for window in windows}
        documents = VisibleKeys.in_documents(document_ids, is_causal=self.config.is_causal)
        return {
            window: self.translate(documents.within(window, s, document_ids.device), s) for window in windows
        }

    def in_whole_sample(self, s: int, window: int | None) -> VisibleKeys:
        """Return the keys of the queries of one sample without documents, computed at the first call."""
        assert self.config.is_causal, "bidirectional attention must know the padding"
        if (s, window) not in self._whole:
            whole = VisibleKeys().within(window, s, self.context.device)
            self._whole[s, window] = self.translate(whole, s)
        return self._whole[s, window]

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys in the representation that the core computes with."""
        return visible

    def prepare(self, seq_length: int) -> None:
        """Build the tables for samples of this length, for layers that are then compiled."""
        self.exclude_from_graphs()
        for rotation in self.rotations.values():
            rotation.table(seq_length)
        if self.query_scale is not None:
            self.query_scale.table(seq_length)
        if self.config.is_causal and not self.context.has_documents:
            for window in self.windows:
                self.in_whole_sample(seq_length, window)

    @abstractmethod
    def exclude_from_graphs(self) -> None:
        """Exclude attention from the graphs of compiled layers, if it cannot be compiled."""

    def tables(self) -> Iterable[Tensor]:
        """Yield the tables that all layers share and that autograd may save."""
        for rotation in self.rotations.values():
            for angles in rotation.tables.values():
                yield from angles
        if self.query_scale is not None:
            yield from self.query_scale.tables.values()
        for visible in self._whole.values():
            yield from (each for each in (visible.starts, visible.bias) if each is not None)

    @abstractmethod
    def for_layer(self, layer: int, kind: LayerKind) -> LayerCore:
        """Return the core of one layer, and count its window among `windows`."""

    def add_window(self, window: int | None) -> None:
        """Count the window of a layer among `windows`."""
        if window not in self.windows:
            self.windows.append(window)

    def recurrent_state(self, layer: int) -> RecurrentState | None:
        """Return what a recurrent layer keeps between the pieces of a sequence: nothing in training."""
        return None


class AttentionCore(StageCore):
    """Is the base class of the backends for training.

    Attributes:
        scales: factors of the products of queries and keys, by head size.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        of_kinds = map(config.for_kind, config.head_kinds)
        self.scales = {each.head_dim: each.score_scale for each in of_kinds}

    def for_layer(self, layer: int, kind: LayerKind) -> LayerCore:
        """Return the core of one layer: this object, because it has no state per layer."""
        self.add_window(kind.window)
        return self

    def exclude_from_graphs(self) -> None:
        """Do nothing: attention is compiled with its layer."""

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; see `LayerCore`."""


class SdpaCore(AttentionCore):
    """Calls PyTorch's scaled_dot_product_attention, without dropout: its masks would depend on the layout.

    ALiBi, documents and windows are passed as a bias ``[b or 1, n or 1, m, s]``; layers of a kind share it.

    Args:
        kernels: kernels that it may use, the preferred one first; by default any kernel.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, *kernels: SDPBackend) -> None:
        super().__init__(config, context)
        self.has_bias = config.position_embedding_type == "alibi"
        self._distances: dict[int, Tensor] = {}
        self.kernels: Callable[[], AbstractContextManager[Any]] = (
            partial(sdpa_kernel, list(kernels), set_priority=True) if kernels else nullcontext
        )

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys as a bias, unless they are those of all queries in causal attention."""
        is_causal = visible.starts is None and visible.ends is None
        if is_causal and not self.has_bias:
            return visible
        return VisibleKeys(bias=self._bias(visible, s, range(s)))

    def _bias(self, visible: VisibleKeys, s: int, queries: range) -> Tensor:
        """Return the bias of these queries, ``[b or 1, n or 1, m, s]``."""
        hidden = visible.hidden(queries, range(s), self.context.device)
        return self._distance_bias(s, queries).masked_fill(hidden[:, None], -torch.inf)

    def _distance_bias(self, s: int, queries: range) -> Tensor:
        if not self.context.has_documents:  # the bias itself is a table
            return distance_bias(self.config, self.context, s, queries)
        if s not in self._distances:
            self._distances[s] = distance_bias(self.config, self.context, s, range(s))
        return self._distances[s][:, queries.start : queries.stop]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; see `LayerCore`."""
        assert drop.p == 0.0, "this backend does not support dropout of attention weights"
        assert sinks is None, "this backend does not support sinks"
        with self.kernels():
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible.bias,
                is_causal=visible.bias is None,
                scale=self.scales[q.shape[-1]],
                enable_gqa=q.shape[1] != k.shape[1],
            )


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: CausalSoftmax,
        blocking: Blocking,
        largest: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out, sums = attend(q, k, v, softmax, blocking, largest)
        if sinks is not None:
            add_sinks_(out, sums, sinks)
        of_sinks = (out, sinks) if sinks is not None and sinks.requires_grad else ()
        ctx.save_for_backward(q, k, v, sums, *of_sinks)
        ctx.softmax, ctx.blocking = softmax, blocking
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, sums, *of_sinks) = grads, ctx.saved_tensors
        results = attend_backward(grad, q, k, v, sums, ctx.softmax, ctx.blocking)
        grad_sinks = None
        if of_sinks:
            out, sinks = of_sinks
            grad_sinks = sinks_gradient(grad, out, sums, sinks)
        return *gradients_of(results), None, None, None, grad_sinks


class SoftmaxCore(AttentionCore):
    """Is the base class of our kernels: slopes and documents instead of a bias, counter-based dropout."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.slopes = local_slopes(config, context)
        self.cap = config.attn_logit_softcapping

    def softmax(self, k: Tensor, visible: VisibleKeys, drop: Drop) -> CausalSoftmax:
        """Return the softmax of the scores of queries ``[b, n, m, d]`` with keys ``[b, g', s, d]``."""
        return CausalSoftmax(k.shape[2], self.scales[k.shape[3]], self.slopes, visible, drop, self.cap)

    def in_slices(
        self, q: Tensor, softmax: CausalSoftmax, attend: Callable[[Tensor, CausalSoftmax], Tensor]
    ) -> Tensor:
        """Compute attention of each slice of the rank's queries ``[b, n, m, d]``, if it has slices.

        Args:
            attend: maps consecutive queries, the first of which is at `VisibleKeys.first`, to their output.
        """
        if not self.context.gathers_keys:
            return attend(q, softmax)
        runs = self.own_positions.runs(q.shape[2])
        slices = zip(q.split([len(run) for run in runs], dim=2), runs, strict=True)
        visible = softmax.visible
        outs = (attend(x, softmax._replace(visible=visible._replace(first=run.start))) for x, run in slices)
        return torch.cat([x.permute(2, 0, 1, 3) for x in outs]).permute(1, 2, 0, 3)  # tokens outermost


class UnfusedCore(SoftmaxCore):
    """Computes attention block by block; supports all positions, head sizes, dtypes, devices and dropout."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.blocking = Blocking.for_device(context.device, context.dtype)

    def for_layer(self, layer: int, kind: LayerKind) -> LayerCore:
        """Return the core of one layer, which has a state of its own only for QK-clip."""
        core = super().for_layer(layer, kind)
        return MeasuredCore(self) if self.config.qk_clip else core

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; see `LayerCore`."""
        return self.attend(q, k, v, visible, drop, sinks)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
        largest: Tensor | None = None,
    ) -> Tensor:
        """Compute attention, and raise the `largest` scores of the heads, ``[n]``; see `LayerCore`."""

        def of_slice(queries: Tensor, softmax: CausalSoftmax) -> Tensor:
            if torch.compiler.is_compiling():
                return traced_attention(queries, k, v, softmax, self.blocking, sinks)
            out: Tensor = _BlockwiseAttention.apply(queries, k, v, softmax, self.blocking, largest, sinks)
            return out

        return self.in_slices(q, self.softmax(k, visible, drop), of_slice)


class MeasuredCore:
    """Computes attention of one layer, and keeps the largest score of each head.

    Attributes:
        largest: largest scaled score of a query and a key that it sees, by query head of this rank,
            ``[n/tp]``. A cap of the scores and ALiBi's bias are not included.
    """

    def __init__(self, core: UnfusedCore) -> None:
        self.core = core
        context = core.context
        self.largest = torch.full(
            (core.config.num_attention_heads // context.tp.size,),
            -torch.inf,
            dtype=torch.promote_types(context.dtype, torch.float32),
            device=context.device,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; see `LayerCore`."""
        of_ranks = self.largest.view(-1, q.shape[1])  # several rows if ranks exchange heads for tokens
        own = of_ranks[self.core.context.attention_heads.index % len(of_ranks)]
        return self.core.attend(q, k, v, visible, drop, sinks, own)


class TritonCore(SoftmaxCore):
    """Computes attention in our Triton kernels, with the dropout masks of `UnfusedCore`.

    Values of another size than keys are padded with zeros, or the keys are.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; see `LayerCore`."""
        softmax, size = self.softmax(k, visible, drop), v.shape[3]
        if size != k.shape[3]:
            q, k, v = (F.pad(x, (0, max(size, k.shape[3]) - x.shape[3])) for x in (q, k, v))
        out = self.in_slices(
            q, softmax, lambda queries, of_slice: flash_attention(queries, k, v, of_slice, sinks)
        )
        return out if size == out.shape[3] else out[..., :size]
