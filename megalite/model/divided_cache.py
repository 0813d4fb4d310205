"""A cache of keys and values that is divided over context-parallel ranks, for generation after long prompts.

The ranks read most of a prompt in slices, as in training with ring attention, and each keeps the keys and
values of its own tokens. All of them read the tokens after these, the last ones of the prompt and the new
ones, and one rank after another keeps their keys and values. A query of such a token attends to the keys of
each rank there, and the ranks merge the results.

Shapes: s new tokens, l tokens of which the rank has keys, b sequences, n query heads, g' key/value heads of
this rank, d head size, d' size of values, tp = tp.size, cp = cp.size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import start_all_gather
from megalite.kernels import CausalSoftmax, VisibleKeys, add_sinks_
from megalite.microbatch import Microbatch
from megalite.model.attention_backends import fastest_blocks, plain_blocks
from megalite.model.attention_block import Blocks, attend_in_blocks, merge_
from megalite.model.kv_cache import CachedCore, attention_and_sums
from megalite.model.positions import PositionInfo, local_slopes
from megalite.model.ring_attention import Ring, slices_of_ranks
from megalite.tensor_parallel.parameter_spec import LayerContext


class DividedCore(CachedCore):
    """Computes attention as `CachedCore` does, with 1/cp of the keys and values on each rank.

    A rank's cache holds the keys of its slices of the first piece, and then those of every cp-th token.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        assert context.ring is not None and context.head_ranks is None, "the first piece needs a ring"
        self.cp = context.cp
        super().__init__(config, context)
        self.is_plain = True  # `attend` merges sums, which torch's attention does not return
        self.slopes = local_slopes(config, context)
        self.blocks = _blocks_for(config, context)

    def max_sliced_tokens(self, num_tokens: int) -> int:
        """Return how many of the first tokens the ranks should read in slices: two slices for each rank.

        At least one token remains, which all ranks read: they all get the hidden states that the next token
        is sampled from.
        """
        step = 2 * self.cp.size
        return (num_tokens - 1) // step * step

    def local_microbatch(self, microbatch: Microbatch) -> Microbatch:
        """Return the part of the next piece that this rank reads."""
        if self.length >= self.num_sliced:
            return microbatch
        assert microbatch.tokens.shape[1] == self.num_sliced, (
            microbatch.tokens.shape,
            self.num_sliced,
        )
        return microbatch.cut(self.own_positions.runs(self.num_sliced // self.cp.size))

    def num_local_keys(self, num_tokens: int) -> int:
        """Return how many of the first tokens of sequences have their keys on this rank."""
        later = range(self.num_sliced + self.cp.rank, num_tokens, self.cp.size)
        return min(self.num_sliced, num_tokens) // self.cp.size + len(later)

    def local_keys(self, x: Tensor) -> Tensor:
        """Return what this rank holds of new keys or values ``[b, g', s, d]``."""
        if self._reads_slices:
            return x
        num_before = self.length - x.shape[2] - self.num_sliced  # tokens that all ranks have read
        return x[:, :, (self.cp.rank - num_before) % self.cp.size :: self.cp.size]

    @property
    def _reads_slices(self) -> bool:
        """Return whether the newest piece is the first one, in slices: every other one makes it longer."""
        return 0 < self.num_sliced == self.length

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Append the new tokens, and return their angles and the keys that they see.

        The keys of the first piece are those of all ranks. For later pieces they are the rank's own, as a
        bias ``[b or 1, n/tp or 1, s, l]``.
        """
        if self.length >= self.num_sliced:
            return super().position_info(microbatch)
        ids, s, device = microbatch.position_ids, self.num_sliced, self.context.device
        assert ids is not None
        self.length = s
        whole = self._after_padding()
        visible = {window: whole.within(window, s, device).expand(len(ids)) for window in self.windows}
        angles = {own: each.compute(ids) for own, each in self.rotations.items()}
        starts = self._starts(range(s)) if self.config.has_recurrent_layers else None
        return PositionInfo(visible, angles, self.query_factors(s, ids), starts)

    def _bias(self, visible: VisibleKeys, s: int, queries: range) -> Tensor:
        """Return the bias of these queries for the keys that this rank holds, ``[b or 1, n or 1, m, l]``."""
        slices = self.own_positions.runs(self.num_sliced // self.cp.size)  # none if the first piece has none
        bias = super()._bias(visible, s, queries)
        of_slices = (bias[..., run.start : run.stop] for run in slices)
        return torch.cat((*of_slices, bias[..., self.num_sliced + self.cp.rank :: self.cp.size]), dim=-1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Map new queries to their attention to the keys of all ranks; see `CachedCore.attend`."""
        if self._reads_slices:
            softmax = CausalSoftmax(self.length, scale, self.slopes, visible, cap=self.cap)
            held = slices_of_ranks(self.own_positions, self.length)
            return attend_in_blocks(q, k, v, Ring(self.cp, held, softmax, self.blocks), sinks)
        assert visible.bias is not None
        own = attention_and_sums(q, k, v, visible.bias, scale, self.cap)
        out, log_sums = _merged(*own, self.cp)
        if sinks is not None:
            add_sinks_(out, log_sums, sinks)
        return out.to(q.dtype)


def _merged(out: Tensor, log_sums: Tensor, cp: Axis) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of all ranks from that to each rank's; every rank returns the same bits.

    Args:
        out, log_sums: results of `attention_and_sums`.
    """
    packed = torch.cat((out, log_sums.unsqueeze(-1)), dim=-1)[None]  # [1, b, n, s, d' + 1]
    first, *others = start_all_gather(packed, cp, of="attention to the keys of each rank").wait()
    whole, sums = first[..., :-1].clone(), first[..., -1].clone()
    for other in others:
        merge_(whole, sums, other[..., :-1], other[..., -1])
    return whole, sums


def _blocks_for(config: ModelConfig, context: LayerContext) -> Blocks:
    """Return the fastest kernels of a ring that support padding, which they hide like other documents."""
    if config.multi_latent_attention:  # the latents of a head are too wide for the kernels
        return plain_blocks(context)
    return fastest_blocks(config, replace(context, has_documents=True))


def build_cache(config: ModelConfig, context: LayerContext) -> CachedCore:
    """Build the attention core of a stage that generates text."""
    return (CachedCore if context.cp.size == 1 else DividedCore)(config, context)
