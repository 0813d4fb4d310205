"""The attention core with a cache of keys, values and states of recurrent layers, for generation.

Sequences of different lengths end at the same index: shorter ones are padded on the left, and no token
attends to the padding. All sequences advance together, and the cache is written and read in slices.

With context parallelism, the cache is divided over the ranks. They read most of a prompt in slices, as in
training with ring attention, and each keeps the keys and values of its own tokens. All of them read the
tokens after these, the last ones of the prompt and the new ones, and one rank after another keeps their keys
and values. A query of such a token attends to the keys of each rank there, and the ranks merge the results.

Shapes: s new tokens, l tokens so far including the new ones, of which the rank has keys, b sequences, n query
heads, g' key/value heads of this rank, d head size, d' size of values, tp = tp.size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalite.attention.choice import fastest_kernel
from megalite.attention.core import LayerCore, RecurrentState, StageCore
from megalite.attention.kernels import LEAST, BlockKernel, SdpaKernel, differentiable, merge_
from megalite.attention.plain import PlainKernel
from megalite.attention.positions import PositionInfo, local_slopes
from megalite.attention.ring import Ring, slices_of_ranks
from megalite.config import AttentionSpec, ModelConfig
from megalite.config.model.attention import LatentSpec
from megalite.data.microbatch import Microbatch
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import start_all_gather
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys
from megalite.kernels.softmax import finish_
from megalite.tensor_parallel.parameter_spec import LayerContext


class CachedCore(StageCore):
    """Caches of the attention of a model that reads a sequence in pieces: first a prompt, then single tokens.

    Call `begin` before the first piece. Pass the result of `positions` as each piece's `position_ids`. The
    stage calls `position_info` once per piece, for all layers; it advances `length`.

    Attributes:
        ranks: ranks that the cache is divided over. A rank's cache holds the keys of its slices of the first
            piece, and then those of every token that comes as many tokens after the last one as there are
            ranks.
        length: number of tokens in a sequence so far, l, including padding.
        is_plain: whether scores are computed in plain PyTorch: PyTorch's attention has only one softmax, and
            does not return the sums that ranks merge.
    """

    is_cached = True

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context, {})
        self.ranks, self.cap = context.topology.position_ranks, config.attn_logit_softcapping
        self.slopes = local_slopes(config, context)
        self.kernel = SdpaKernel(config, context)
        self.is_plain = not config.has_usual_softmax
        if self.ranks.size > 1:
            assert context.ring is not None and context.head_ranks is None, "the first piece needs a ring"
            self.is_plain = True
            # Padding is hidden like other documents. The latents of a head are too wide for other kernels.
            self.ring_kernel: BlockKernel = (
                PlainKernel(config, context)
                if config.multi_latent_attention
                else fastest_kernel(config, replace(context, has_documents=True))
            )
        self.layers: dict[int, CachedLayer] = {}
        self.states: dict[int, RecurrentState] = {}
        self.begin(0)

    def for_layer(self, layer: int, spec: AttentionSpec) -> CachedLayer:
        """Return the core of one layer, with its keys and values: its own, or those of an earlier layer."""
        self.windows.setdefault(spec.window, [])
        source, *_ = *spec.reads, layer
        return self.layers.setdefault(source, CachedLayer(self, spec))

    def recurrent_state(self, layer: int) -> RecurrentState:
        """Return what a recurrent layer keeps between the pieces of a sequence."""
        return self.states.setdefault(layer, RecurrentState())

    def max_sliced_tokens(self, num_tokens: int) -> int:
        """Return how many of the first tokens of sequences ranks should read in slices, two for each rank.

        At least one token remains, which all ranks read: they all get the hidden states that the next token
        is sampled from.
        """
        step = 2 * self.ranks.size
        return (num_tokens - 1) // step * step if self.ranks.size > 1 else 0

    def begin(self, capacity: int, padding: Tensor | None = None, num_sliced: int = 0) -> None:
        """Empty the cache for new sequences.

        Args:
            capacity: largest number of tokens in a sequence, including padding.
            padding: int64 ``[b]``, number of padding tokens before each sequence; None without padding.
            num_sliced: tokens of the first piece, if ranks read it in slices; 0 if each rank reads all
                pieces. `max_sliced_tokens` says how many they can be.
        """
        self.capacity, self.length, self.num_sliced = capacity, 0, num_sliced
        self.padding = padding
        for layer in self.layers.values():
            layer.keys = layer.values = None
        for state in self.states.values():
            state.clear()

    def select(self, rows: Tensor) -> None:
        """Continue with these sequences, int64: omitted ones are dropped, repeated ones are copied."""
        if self.padding is not None:
            self.padding = self.padding[rows]
        held: list[tuple[int, CachedLayer | RecurrentState]] = [*self.layers.items(), *self.states.items()]
        for number, layer in held:
            if number < self.config.num_layers:  # modules of multi-token prediction do not run
                layer.select(rows)

    def local_microbatch(self, microbatch: Microbatch) -> Microbatch:
        """Return the part of the next piece that this rank reads."""
        if self.length >= self.num_sliced:
            return microbatch
        assert microbatch.tokens.shape[1] == self.num_sliced, (microbatch.tokens.shape, self.num_sliced)
        return microbatch.cut(self.own_positions.ranges(self.num_sliced // self.ranks.size))

    def num_local_keys(self, num_tokens: int) -> int:
        """Return how many of the first tokens of sequences have their keys on this rank."""
        later = range(self.num_sliced + self.ranks.rank, num_tokens, self.ranks.size)
        return min(self.num_sliced, num_tokens) // self.ranks.size + len(later)

    def local_keys(self, x: Tensor) -> Tensor:
        """Return what this rank holds of new keys or values ``[b, g', s, d]``."""
        if self._reads_slices:
            return x
        num_before = self.length - x.shape[2] - self.num_sliced  # tokens that all ranks have read
        return x[:, :, (self.ranks.rank - num_before) % self.ranks.size :: self.ranks.size]

    @property
    def _reads_slices(self) -> bool:
        """Return whether the newest piece is the first one, in slices: every other one makes it longer."""
        return 0 < self.num_sliced == self.length

    def positions(self, num_sequences: int, num_tokens: int) -> Tensor:
        """Return the positions of the next tokens, ``[b, s]``: from 0 after the padding, and 0 in padding."""
        indices = torch.arange(self.length, self.length + num_tokens, device=self.context.device)
        if self.padding is None:
            return indices.expand(num_sequences, -1)
        return (indices - self.padding[:, None]).clamp_min_(0)

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Append the new tokens, and return their angles and the keys that they see.

        The keys of a first piece in slices are those of all ranks. For other pieces they are the rank's own,
        as a bias ``[b or 1, n/tp or 1, s, l]``, or causal if that suffices.
        """
        ids, first = microbatch.position_ids, self.length
        assert ids is not None
        self.length = self.num_sliced if first < self.num_sliced else first + ids.shape[1]
        assert self.length <= self.capacity, (self.length, self.capacity)
        new = range(first, self.length)
        visible = {window: self._visible(window, new, len(ids)) for window in self.windows}
        angles = tuple(rotation.compute(ids) for rotation in self.rotations.values())
        starts = self._starts(new) if self.config.recurrences else None
        factors = self.query_factors(len(new), ids)
        return PositionInfo(visible, angles, factors, starts, is_replicated=not self._reads_slices)

    def _visible(self, window: int | None, new: range, num_sequences: int) -> VisibleKeys:
        """Return the keys that new tokens at these indices see, in layers with a window."""
        # Causal from the start, or one token that sees all.
        is_causal = not self.kernel.has_bias and self.padding is None and (new.start == 0 or len(new) == 1)
        is_causal &= window is None or self.length <= window + 1
        if is_causal and not self.is_plain:
            return VisibleKeys()
        keys = VisibleKeys()
        if self.padding is not None:  # a token of the padding sees itself, so that no row is all -inf
            positions = torch.arange(self.length, device=self.context.device)
            keys = VisibleKeys(torch.minimum(self.padding[:, None], positions))
        keys = keys.within(window, self.length, self.context.device)
        if self._reads_slices:
            return keys.expand(num_sequences)
        bias = self.kernel.bias(keys, self.length, new)
        if self.ranks.size > 1:
            slices = self.own_positions.ranges(self.num_sliced // self.ranks.size)  # of the first piece
            of_slices = (bias[..., run.start : run.stop] for run in slices)
            later = bias[..., self.num_sliced + self.ranks.rank :: self.ranks.size]
            bias = torch.cat((*of_slices, later), dim=-1)
        return VisibleKeys(bias=bias)

    def _starts(self, new: range) -> Tensor | None:
        """Return where the sequences of new tokens start, counted from the first of these, ``[b, s]``.

        Each token of the padding is a document of its own.
        """
        if self.padding is None:
            return None
        positions = torch.arange(new.start, new.stop, device=self.context.device)
        return torch.minimum(self.padding[:, None], positions) - new.start

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax) -> Tensor:
        """Map new queries ``[b, n/tp, s, d]`` to ``[b, n/tp, s, d']``, their attention to all ranks' keys.

        Args:
            k, v: all keys and values that this rank holds, ``[b, g', l, d]`` and ``[b, g', l, d']``.
        """
        bias = softmax.visible.bias
        if self._reads_slices:
            held = slices_of_ranks(self.own_positions, self.length)
            return differentiable(q, k, v, Ring(self.ranks, held, softmax, self.ring_kernel))
        if not self.is_plain:
            return self.kernel.attend(q, k, v, softmax)
        assert bias is not None
        out, log_sums = attention_and_sums(q, k, v, bias, softmax.scale, softmax.cap)
        if self.ranks.size > 1:
            out, log_sums = _merged(out, log_sums, self.ranks)
        finish_(out, log_sums, *softmax.parameters)
        return out.to(q.dtype)


class CachedLayer(LayerCore):
    """Keys and values of one layer, ``[b, g', capacity, d]``; those of `CachedCore.length` are filled.

    They are those that the rank holds, and keys are rotated. The keys of multi-latent attention are latents
    and shared parts of keys, ``[b, 1, capacity, c + r]``; their first c elements, the latents, are its
    values.
    """

    def __init__(self, shared: CachedCore, spec: AttentionSpec) -> None:
        super().__init__(shared.config, shared.context, shared.kernel)
        self.shared, self.scale = shared, spec.score_scale
        self.holds_latents = isinstance(spec, LatentSpec)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, int64."""
        self.keys, self.values = (None if x is None else x[rows] for x in (self.keys, self.values))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        *parameters: Tensor | None,
    ) -> Tensor:
        """Append the new keys and values ``[b, g', s, d]`` and map queries ``[b, n/tp, s, d]`` to outputs.

        A layer that shares them with an earlier one writes them a second time. Dropout is ignored: the cache
        is not used in training.
        """
        self.keys, keys = self._appended(self.keys, k)
        values = keys[..., : v.shape[3]]
        if not self.holds_latents:
            self.values, values = self._appended(self.values, v)
        shared = self.shared
        given = tuple(x for x in parameters if x is not None)
        softmax = CausalSoftmax(shared.length, self.scale, shared.slopes, visible, None, shared.cap, given)
        return shared.attend(q, keys, values, softmax)

    def _appended(self, cache: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return a cache with new keys or values ``[b, g', s, d]``, and the part of it that is filled."""
        shared, held = self.shared, self.shared.num_local_keys(self.shared.length)
        if cache is None:
            cache = new.new_empty((*new.shape[:2], shared.num_local_keys(shared.capacity), new.shape[3]))
        new = shared.local_keys(new)
        cache[:, :, held - new.shape[2] : held] = new
        return cache, cache[:, :, :held]


def attention_and_sums(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale q k^T + bias) v, and the logarithms of the softmax's sums, in at least fp32.

    They are ``[b, n, s, d']`` and ``[b, n, s]``; 0 and -inf for a query that sees none of the keys. All
    scores are in memory.

    Args:
        q: ``[b, n, s, d]``.
        k, v: ``[b, g', l, d]`` and ``[b, g', l, d']``; l may be 0.
        bias: ``[b or 1, n or 1, s, l]``.
        cap: c, if c tanh(x / c) replaces each scaled score x.
    """
    shared, wide = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    factor = scale if cap is None else scale / cap
    scores = (q.unflatten(1, (-1, shared)) @ k[:, :, None].mT * factor).flatten(1, 2)  # [b, n, s, l]
    if cap is not None:
        scores.tanh_().mul_(cap)
    scores = scores.to(wide) + bias
    log_sums = scores.logsumexp(-1)
    weights = scores.sub_(log_sums.clamp(min=LEAST)[..., None]).exp_().to(q.dtype)
    out = (weights.unflatten(1, (-1, shared)) @ v[:, :, None]).flatten(1, 2)
    return out.to(wide), log_sums


def _merged(out: Tensor, log_sums: Tensor, ranks: Axis) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of all ranks from that to each rank's; every rank returns the same bits.

    Args:
        out, log_sums: results of `attention_and_sums`.
    """
    packed = torch.cat((out, log_sums.unsqueeze(-1)), dim=-1)[None]  # [1, b, n, s, d' + 1]
    first, *others = start_all_gather(packed, ranks, of="attention to the keys of each rank").wait()
    whole, sums = first[..., :-1].clone(), first[..., -1].clone()
    for other in others:
        merge_(whole, sums, other[..., :-1], other[..., -1])
    return whole, sums
