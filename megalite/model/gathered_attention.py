"""Attention of the slices of queries that a context-parallel rank holds with gathered keys, in blocks.

A slice of queries has two blocks in causal attention: with the keys before the slice, all of which it sees,
and with its own. PyTorch's FlashAttention computes both without a mask in memory.

Shapes: s sequence, b microbatch, n query heads, g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys
from megalite.model.attention_block import Block, Blocks, MergedAttention, attend_in_blocks, merge_
from megalite.model.attention_core import SoftmaxCore
from megalite.tensor_parallel.parameter_spec import LayerContext


class GatheredKeys(NamedTuple):
    """Computes the blocks of a rank's queries with the keys of the whole sample.

    Attributes:
        runs: positions of each slice of queries.
    """

    runs: tuple[range, ...]
    softmax: CausalSoftmax
    blocks: Blocks

    def calls(self) -> Iterator[tuple[slice, slice, Block]]:
        """Yield the tokens of a block's queries among those of the rank, those of its keys, and the block."""
        first = 0
        for run in self.runs:
            rows = slice(first, first + len(run))
            for keys in (run, range(run.start)):
                if keys:
                    yield rows, slice(keys.start, keys.stop), Block(run, keys)
            first = rows.stop

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the blocks; see `BlockPlan`."""
        results: dict[int, tuple[Tensor, Tensor]] = {}  # of each slice of queries
        for rows, columns, block in self.calls():
            found = self.blocks.forward(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], block, self.softmax
            )
            if rows.start in results:
                merge_(*results[rows.start], *found)
            else:
                results[rows.start] = found
        outs, log_sums = zip(*results.values(), strict=True)
        return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of the rank's queries and of all keys and values; see `BlockPlan`."""
        grads = [torch.zeros_like(x, dtype=whole.log_sums.dtype) for x in (q, k, v)]
        for rows, columns, block in self.calls():
            found = self.blocks.backward(
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                whole.rows(rows),
                block,
                self.softmax,
            )
            for total, tokens, more in zip(grads, (rows, columns, columns), found, strict=True):
                total[:, :, tokens] += more
        grad_q, grad_k, grad_v = grads
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


class GatheredCore(SoftmaxCore):
    """Computes attention of a rank's slices of queries with gathered keys, in blocks.

    Args:
        blocks: computes a block.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, blocks: Blocks) -> None:
        super().__init__(config, context)
        self.blocks = blocks
        self.attend = attend_in_blocks

    def exclude_from_graphs(self) -> None:
        """Compute attention between the graphs of compiled layers."""
        self.attend = torch.compiler.disable(self.attend)

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
        runs = self.own_positions.runs(q.shape[2])
        return self.attend(q, k, v, GatheredKeys(runs, self.softmax(k, visible, drop), self.blocks), sinks)
