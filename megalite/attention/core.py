"""The attention core of a stage: what its layers share, and attention of one layer over a kernel.

A context-parallel rank computes queries, keys and values of its own tokens. Before the attention core, the
ranks all-gather keys and values (Llama Team 2024, section 3.3.2), or each rank exchanges heads for tokens
(DeepSpeed-Ulysses, Jacobs et al. 2023). With ring attention, attention itself communicates (`ring`). With
both, neighbouring ranks exchange heads for tokens, and each of them is in a ring with one rank of every other
group of neighbours (Fang and Zhao 2024, arXiv 2405.07719). Each layer may reach keys in its own way. A rank
holds the same tokens in all layers: two slices in zigzag order, unless all of them have a2a.

A recurrence needs the tokens of a sample one after another: ranks exchange tokens for heads before it, and
back after it, however attention reaches keys (`HeadExchange`).

Shapes: s sequence, b microbatch, n query heads of this rank, g its key/value heads, d head size, p ranks.
Values may have heads of another size. With all-gathered keys, the m queries are those of this rank's tokens,
and m = s otherwise. If neighbours exchange heads, s is the number of tokens that they hold together, and p
their number. Functions that return all of s tokens order them by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.attention.kernels import BlockKernel, Kernel, differentiable
from megalite.attention.positions import Angles, PositionInfo, Rotary, build_query_scale, local_slopes
from megalite.attention.ring import GatheredKeys, Ring, slices_of_ranks
from megalite.config import AttentionSpec, ModelConfig
from megalite.config.model.attention import RotarySpec
from megalite.config.parallel import CpCommType
from megalite.data.microbatch import Microbatch
from megalite.distributed.axis import Axis, HeldPositions, range_positions
from megalite.distributed.collectives import (
    all_gather_from,
    all_to_all,
    gather_from_sequence_parallel,
    with_conjugate,
)
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys
from megalite.kernels.packed_heads import Heads
from megalite.kernels.softmax import document_starts
from megalite.tensor_parallel.parameter_spec import LayerContext


class KeyRanks(NamedTuple):
    """Ranks that queries, keys and values are exchanged with before attention.

    Attributes:
        order: positions of the rank's tokens among those that these ranks hold together.
    """

    axis: Axis
    order: HeldPositions

    @staticmethod
    def of(context: LayerContext) -> KeyRanks:
        """Return the ranks of a layer: those that exchange heads with each other, or all."""
        axis = context.head_ranks or context.topology.position_ranks
        # In zigzag order, the first slices of neighbours follow each other, and their last ones in reverse.
        return KeyRanks(axis, HeldPositions(axis.rank, axis.size, context.topology.positions.is_zigzag))


class KeyAccess(NamedTuple):
    """Ways of queries to the keys of other ranks; both functions undo each other.

    Attributes:
        enter: maps queries ``[s/p, b, n, d]``, and keys and values ``[s/p, b, g, d]``, to the arguments of
            the attention core.
        leave: maps the core's output to ``[s/p, b, n, d]``.
    """

    enter: Callable[[Tensor, Tensor, Tensor, KeyRanks], Heads]
    leave: Callable[[Tensor, KeyRanks], Tensor]


def gather_keys(q: Tensor, k: Tensor, v: Tensor, ranks: KeyRanks) -> Heads:
    """Return the rank's queries with all keys and values ``[s, b, g, d]``.

    Backward reduce-scatters the gradients of keys and values.
    """
    gathered = gather_from_sequence_parallel(torch.cat((k, v), dim=3), ranks.axis)
    k, v = ranks.order.in_position_order(gathered).split((k.shape[3], v.shape[3]), dim=3)
    return q, k, v


def exchange_tokens_for_heads(q: Tensor, k: Tensor, v: Tensor, ranks: KeyRanks) -> Heads:
    """Return all tokens of a part of the heads: ``[s, b, n/p, d]``, and twice ``[s, b, max(1, g/p), d]``.

    Several ranks get a copy of a key/value head if there are fewer of them than ranks.
    """
    axis = ranks.axis
    if q.shape[2] == k.shape[2]:
        whole = all_tokens_of_heads(torch.cat((q, k, v), dim=3), axis)
        sizes, dim = [x.shape[3] for x in (q, k, v)], 3
    else:
        copies = max(1, axis.size // k.shape[2])
        heads = q, *(x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        parts = [x.unflatten(2, (axis.size, -1)) for x in heads]  # [s/p, b, p, n/p, d]
        whole = all_tokens_of_heads(torch.cat(parts, dim=3).flatten(2, 3), axis)
        sizes, dim = [part.shape[3] for part in parts], 2
    q, k, v = ranks.order.in_position_order(whole).split(sizes, dim)
    return q, k, v


def return_heads_for_tokens(y: Tensor, ranks: KeyRanks) -> Tensor:
    """Return the rank's tokens of all heads: ``[s, b, n/p, d]`` to ``[s/p, b, n, d]``."""
    return exchange_heads_for_tokens(ranks.order.in_rank_order(y), ranks.axis)


def all_tokens_of_heads(x: Tensor, axis: Axis) -> Tensor:
    """Return all tokens of a part of the heads: ``[s/p, b, n, d]`` to ``[s, b, n/p, d]``.

    They are in the order of the ranks that held them.
    """
    return with_conjugate(x, axis, _to_heads, _to_tokens)


def exchange_heads_for_tokens(y: Tensor, axis: Axis) -> Tensor:
    """Undo `all_tokens_of_heads`: ``[s, b, n/p, d]`` to ``[s/p, b, n, d]``."""
    return with_conjugate(y, axis, _to_tokens, _to_heads)


def key_access(context: LayerContext) -> KeyAccess:
    """Return how the queries of a layer reach the keys of other ranks before its kernel runs."""
    if context.head_ranks is not None and context.head_ranks.size > 1:
        return KeyAccess(exchange_tokens_for_heads, return_heads_for_tokens)
    if context.gathers_keys:
        return KeyAccess(gather_keys, lambda y, ranks: y)
    return KeyAccess(lambda q, k, v, ranks: (q, k, v), lambda y, ranks: y)  # a ring brings them to the kernel


def _exchanged(x: Tensor, axis: Axis) -> Tensor:
    """Send ``x[i]`` of ``[p, ...]`` to rank i, and return what the ranks sent, in their order."""
    sizes = [x.numel() // axis.size] * axis.size
    return all_to_all(x.contiguous().view(-1), sizes, sizes, axis).view(x.shape)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    """Map ``[s/p, b, n, d]`` to ``[s, b, n/p, d]``."""
    return _exchanged(x.unflatten(2, (axis.size, -1)).movedim(2, 0), axis).flatten(0, 1)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Map ``[s, b, n/p, d]`` to ``[s/p, b, n, d]``."""
    return _exchanged(x.unflatten(0, (axis.size, -1)), axis).movedim(0, 2).flatten(2, 3)


class HeadExchange:
    """Exchanges of tokens for heads between context-parallel ranks, for a recurrent layer.

    If the ranks hold zigzag slices or assigned documents, tokens are put into the order of positions. In
    generation, each rank has the tokens after the prompt, and keeps the states of its heads. c is the number
    of features of one tensor-parallel rank, grouped by head.

    Every rank has the parameters of all heads, and uses those of its part. The gradients of the other heads
    are zeros, and the sum over the replicas of a parameter, to which these ranks belong, is complete.
    """

    def __init__(self, context: LayerContext) -> None:
        self.ranks, self.positions = context.topology.position_ranks, context.topology.positions

    def to_heads(self, x: Tensor, positions: PositionInfo) -> Tensor:
        """Return all tokens of the rank's heads: ``[s/p, b, c]`` to ``[s, b, c/p]``.

        If every rank has all tokens, ``[s, b, c]``, it selects its heads.
        """
        if self.ranks.size == 1:
            return x
        if positions.is_replicated:
            return x.chunk(self.ranks.size, dim=-1)[self.ranks.rank]
        heads = x.unflatten(-1, (self.ranks.size, -1))  # [s/p, b, p, c/p]
        tokens = all_tokens_of_heads(heads, self.ranks).flatten(2)
        if positions.rank_order is None:
            return self.positions.in_position_order(tokens)
        return _rows(tokens, positions.rank_order.argsort(dim=0))

    def to_tokens(self, y: Tensor, positions: PositionInfo) -> Tensor:
        """Return all heads of the rank's tokens: ``[s, b, c/p]`` to ``[s/p, b, c]``, or all tokens."""
        if self.ranks.size == 1:
            return y
        if positions.is_replicated:
            return all_gather_from(y, self.ranks)
        order = positions.rank_order
        tokens = self.positions.in_rank_order(y) if order is None else _rows(y, order)
        return exchange_heads_for_tokens(tokens.unsqueeze(2), self.ranks).flatten(2)

    def own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to the rank's heads, which dim 0 lists in order."""
        return parameter if self.ranks.size == 1 else parameter.chunk(self.ranks.size)[self.ranks.rank]


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """Return the rows of ``[s, b, c]`` in an order of each sample's own, ``[s, b]``."""
    return x.gather(0, order.unsqueeze(-1).expand_as(x))


class LayerCore:
    """Steps around a kernel in the layers of a stage that reach the keys of other ranks in the same way.

    Attributes:
        choice: the backend and the reason for its choice, for the log.
        scales: factors of the products of queries and keys, by head size.
        largest: for QK-clip, largest scaled score of a query and a key that it sees, by query head of this
            rank, ``[n/tp]``. A cap of the scores and ALiBi's bias are not included. None without QK-clip.
    """

    largest: Tensor | None = None

    def __init__(self, config: ModelConfig, context: LayerContext, kernel: Kernel, choice: str = "") -> None:
        self.config, self.context, self.kernel, self.choice = config, context, kernel, choice
        self.scales = {spec.head_dim: spec.score_scale for spec in config.head_specs}
        self.slopes, self.cap = local_slopes(config, context), config.attn_logit_softcapping
        self.access, self.ranks = key_access(context), KeyRanks.of(context)
        self.attend = _attend_whole
        if context.ring is not None:
            self.attend = _attend_in_ring
        elif context.gathers_keys:
            self.attend = _attend_slices if kernel.attends_slices else _attend_gathered

    def measured(self) -> LayerCore:
        """Return the core of one layer whose largest scores are kept."""
        core, context = copy(self), self.context
        core.largest = torch.full(
            (self.config.num_attention_heads // context.tp.size,),
            -torch.inf,
            dtype=torch.promote_types(context.dtype, torch.float32),
            device=context.device,
        )
        return core

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> Heads:
        """Return the arguments of attention from those of this rank's tokens; see `KeyAccess`."""
        return self.access.enter(q, k, v, self.ranks)

    def leave(self, y: Tensor) -> Tensor:
        """Return all heads of this rank's tokens from the output of attention; see `KeyAccess`."""
        return self.access.leave(y, self.ranks)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        *parameters: Tensor | None,
    ) -> Tensor:
        """Map ``[b, n, m, d]``, ``[b, g', s, d]`` and ``[b, g', s, d']`` to ``[b, n, m, d']``.

        In a ring, the keys and values are those of the rank's tokens.

        Args:
            visible: keys that each query sees, from `PositionInfo`.
            drop: dropout settings of the attention weights.
            parameters: per-head tensors of the softmax, ``[n/tp]``; None for one that the layer lacks.
        """
        scale = self.scales[k.shape[3]]
        own = [self.of_heads(x, q) for x in parameters]
        given = tuple(x for x in own if x is not None)
        softmax = CausalSoftmax(k.shape[2], scale, self.slopes, visible, drop, self.cap, given)
        return self.attend(self, q, k, v, softmax)

    def of_heads(self, x: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the part of ``[n/tp]`` of the heads of queries ``[b, n', m, d]``: ranks exchange some."""
        if x is None:
            return None
        of_ranks = x.view(-1, q.shape[1])
        return of_ranks[self.context.attention_heads.index % len(of_ranks)]

    def exclude_from_graphs(self) -> None:
        """Exclude attention from the graphs of compiled layers, if it cannot be compiled."""
        self.kernel.exclude_from_graphs()
        if self.attend is _attend_gathered:
            self.attend = torch.compiler.disable(self.attend)


def _attend_whole(core: LayerCore, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax) -> Tensor:
    return core.kernel.attend(q, k, v, softmax, core.of_heads(core.largest, q))


def _attend_slices(core: LayerCore, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax) -> Tensor:
    runs = core.context.topology.positions.ranges(q.shape[2])
    return core.kernel.attend(q, k, v, softmax, core.of_heads(core.largest, q), runs)


def _attend_gathered(core: LayerCore, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax) -> Tensor:
    assert isinstance(core.kernel, BlockKernel)
    assert softmax.drop is None or softmax.drop.p == 0.0, "this kernel has no dropout"
    runs = core.context.topology.positions.ranges(q.shape[2])
    return differentiable(q, k, v, GatheredKeys(runs, softmax, core.kernel))


def _attend_in_ring(core: LayerCore, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax) -> Tensor:
    kernel, ring = core.kernel, core.context.ring
    assert isinstance(kernel, BlockKernel) and ring is not None
    s, assignments = k.shape[2] * ring.size, softmax.visible.assignments
    softmax = softmax._replace(seq_length=s)
    if assignments is None:
        own = core.context.topology.positions
        own = own.group_positions(own.count // ring.size)
        return differentiable(q, k, v, Ring(ring, slices_of_ranks(own, s), softmax, kernel))
    of_samples = []
    for i, held in enumerate(assignments):
        own_q, own_k, own_v = (x[i : i + 1] for x in (q, k, v))
        rank_blocks = Ring(ring, held, _of_sample(softmax, i), kernel)
        of_samples.append(differentiable(own_q, own_k, own_v, rank_blocks))
    return torch.cat(of_samples)


def _of_sample(softmax: CausalSoftmax, index: int) -> CausalSoftmax:
    own, drop = slice(index, index + 1), softmax.drop
    if drop is not None:
        drop = drop._replace(sample_numbers=drop.sample_numbers[own])
    return softmax._replace(visible=softmax.visible.part(own), drop=drop)


class StageCore:
    """Positions, visible keys and tables that all layers of a stage share, and their attention.

    Args:
        cores: attention of layers, by their communication type of context parallelism.

    Attributes:
        windows: for each window of layers that use the core, the attention of these layers.
        is_cached: whether it keeps the keys and values of earlier calls.
    """

    is_cached = False

    def __init__(
        self, config: ModelConfig, context: LayerContext, cores: Mapping[CpCommType, LayerCore]
    ) -> None:
        self.config, self.context, self.cores = config, context, cores
        self.query_scale = build_query_scale(config, context)
        self.windows: dict[int | None, list[LayerCore]] = {}
        self.own_positions = context.topology.positions
        self._whole: dict[tuple[int, int | None], VisibleKeys] = {}

    @property
    def choice(self) -> str:
        """Return the backends and the reasons for their choice, for the log."""
        if len(self.cores) == 1:
            return next(iter(self.cores.values())).choice
        return "; ".join(f"with --cp-comm-type {each}, {core.choice}" for each, core in self.cores.items())

    @cached_property
    def rotations(self) -> Mapping[RotarySpec, Rotary]:
        """Return the rotary embeddings of all layers, each once."""
        specs = (spec.attention for spec in self.config.layer_specs)
        found = dict.fromkeys(spec.rotary for spec in specs if spec is not None and spec.rotary is not None)
        return {spec: Rotary(spec, self.config, self.context) for spec in found}

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Return the positions of a microbatch's tokens, computed once for all layers."""
        ids, positions, own = microbatch.document_ids, microbatch.position_ids, self.own_positions
        assignments, has_recurrent = microbatch.assignments, bool(self.config.recurrences)
        b, s = microbatch.tokens.shape[0], microbatch.tokens.shape[1] * own.count
        angles: tuple[Angles, ...] | None = None
        if positions is not None:
            angles = tuple(rotation.look_up(positions, s) for rotation in self.rotations.values())
        elif own.count > 1:
            angles = tuple(rotation.held_by(own, s) for rotation in self.rotations.values())
        factors = self.query_factors(s, positions)
        starts = document_starts(ids) if ids is not None and has_recurrent else None
        if assignments is None:
            return PositionInfo(self.visible_keys((b, s), ids, self.windows), angles, factors, starts)
        visible = {  # the documents are in the assignments
            window: keys._replace(assignments=assignments)
            for window, keys in self.visible_keys((b, s), None, self.windows).items()
        }
        order = None
        if has_recurrent:
            of_ranks = ([run.positions for runs in each.ranks for run in runs] for each in assignments)
            order = torch.stack([range_positions(runs, self.context.device) for runs in of_ranks], dim=1)
        return PositionInfo(visible, angles, factors, starts, rank_order=order)

    def query_factors(self, seq_length: int, position_ids: Tensor | None) -> Tensor | None:
        """Return the factors of this rank's queries of `PositionInfo`.

        Args:
            seq_length: tokens of a whole sample.
            position_ids: of this rank's tokens; None for positions within the sample.
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
        if (s, window) not in self._whole:
            assert self.config.is_causal, "bidirectional attention must know the padding"
            whole = VisibleKeys().within(window, s, self.context.device)
            self._whole[s, window] = self.translate(whole, s)
        return self._whole[s, window]

    def translate(self, visible: VisibleKeys, s: int) -> VisibleKeys:
        """Return the keys in the representations of all kernels whose layers have their window."""
        if len(self.cores) == 1:
            return next(iter(self.cores.values())).kernel.translate(visible, s)
        found = visible
        for core in self.windows.get(visible.window, ()):
            own = core.kernel.translate(visible, s)
            found = found if own.bias is None else found._replace(bias=own.bias)
            found = found if own.blocks is None else found._replace(blocks=own.blocks)
        return found

    def prepare(self, seq_length: int) -> None:
        """Build the tables for samples of this length, for layers that are then compiled."""
        for core in self.cores.values():
            core.exclude_from_graphs()
        for rotation in self.rotations.values():
            rotation.table(seq_length)
        if self.query_scale is not None:
            self.query_scale.table(seq_length)
        if self.config.is_causal and not self.context.has_documents:
            for window in self.windows:
                self.in_whole_sample(seq_length, window)

    def tables(self) -> Iterable[Tensor]:
        """Yield the tables that all layers share and that autograd may save."""
        for rotation in self.rotations.values():
            for angles in rotation.tables.values():
                yield from angles
        if self.query_scale is not None:
            yield from self.query_scale.tables.values()
        for visible in self._whole.values():
            yield from (each for each in (visible.starts, visible.bias) if each is not None)

    def for_layer(self, layer: int, spec: AttentionSpec) -> LayerCore:
        """Return the attention of one layer, and count its window among `windows`."""
        core = next(iter(self.cores.values()))
        if len(self.cores) > 1:
            core = self.cores[self.context.for_layer(layer).layer_cp_comm_type]
        of_window = self.windows.setdefault(spec.window, [])
        if core not in of_window:
            of_window.append(core)
        return core.measured() if self.config.qk_clip else core

    def recurrent_state(self, layer: int) -> RecurrentState | None:
        """Return what a recurrent layer keeps between the pieces of a sequence: nothing in training."""
        return None


class RecurrentState:
    """Tensors of a recurrent layer between the pieces of a sequence, None before the first one.

    Attributes:
        inputs: last inputs of the layer's convolution, ``[b, kernel - 1, channels]``.
        state: state of its recurrence, ``[b, ...]``; None if it has none.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the sequences."""
        self.inputs: Tensor | None = None
        self.state: Tensor | None = None

    def keep(self, inputs: Tensor, state: Tensor | None = None) -> None:
        """Keep what the next piece needs; `inputs` may be a view of all inputs of the piece."""
        self.inputs, self.state = inputs.clone(), state

    def select(self, rows: Tensor) -> None:
        """Continue with these sequences, int64: omitted ones are dropped, repeated ones are copied."""
        assert self.inputs is not None
        self.inputs = self.inputs[rows]
        self.state = None if self.state is None else self.state[rows]
