"""The attention core of a stage: what its layers share, and attention of one layer over a kernel.

Shapes: s sequence, b microbatch, n query heads of this rank, g' its key/value heads, d head size. With
all-gathered keys, the m queries are those of this rank's tokens, and m = s otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from megalite.attention.exchange import KeyRanks, key_access
from megalite.attention.kernels import BlockKernel, Kernel, differentiable
from megalite.attention.positions import Angles, PositionInfo, Rotary, build_query_scale, local_slopes
from megalite.attention.ring import GatheredKeys, Ring, slices_of_ranks
from megalite.config import AttentionSpec, ModelConfig
from megalite.config.model.attention import RotarySpec
from megalite.config.parallel import CpCommType
from megalite.data.batch.microbatch import Microbatch
from megalite.distributed.axis import range_positions
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys
from megalite.kernels.packed_heads import Heads
from megalite.kernels.softmax import document_starts
from megalite.tensor_parallel.parameter_spec import LayerContext


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
    """Return the softmax of one of the samples."""
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
        assert self.config.is_causal, "bidirectional attention must know the padding"
        if (s, window) not in self._whole:
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
    """Tensors of a recurrent layer between the pieces of a sequence, both None before the first one.

    The layer's forward replaces them.

    Attributes:
        inputs: last inputs of the layer's convolution, ``[b, kernel - 1, channels]``.
        state: state of its recurrence, ``[b, ...]``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the sequences."""
        self.inputs: Tensor | None = None
        self.state: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Continue with these sequences, int64: omitted ones are dropped, repeated ones are copied."""
        assert self.inputs is not None and self.state is not None
        self.inputs, self.state = self.inputs[rows], self.state[rows]
