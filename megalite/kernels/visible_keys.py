"""The keys that each query of attention sees.

Shapes: b samples, s positions of a whole sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.data.batch.document_assignment import Assignment

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_KEY_MULTIPLE = 16
"""A block of keys starts at a multiple of this: its rows then start at a multiple of 16 bytes, and at a whole
block of random numbers."""


class VisibleKeys(NamedTuple):
    """Keys that each query sees: consecutive positions that include its own.

    Positions count from the start of the whole sample, even if a rank or a step of generation holds only some
    of the queries or keys. An attention core may replace `starts` and `ends` by `bias` or `blocks`.

    Attributes:
        starts: int64 ``[b, s]``, position of each query's first key; None if this is 0 for all.
        ends: int64 ``[b, s]``, position after each query's last key; None if its own key is the last: causal
            attention.
        window: largest number of keys before its own that a query sees; None without this limit. `starts`
            contains it. Blocks of keys are skipped by this number, without reading `starts` on the host.
        bias: these keys as a bias of the scores, ``[b or 1, n or 1, queries, keys]``, with ALiBi if the model
            has it.
        blocks: these keys as FlexAttention's mask.
        first: position of the first query that attends.
        assignments: for each sample, the documents at the positions that each context-parallel rank holds, if
            they were assigned. They replace `starts` as the limits of documents.
    """

    starts: Tensor | None = None
    ends: Tensor | None = None
    window: int | None = None
    bias: Tensor | None = None
    blocks: BlockMask | None = None
    first: int = 0
    assignments: tuple[Assignment, ...] | None = None

    @staticmethod
    def in_documents(document_ids: Tensor, *, is_causal: bool) -> VisibleKeys:
        """Return the keys of each query's document, up to its own key if causal.

        Args:
            document_ids: ``[b, s]``, equal within a document.
        """
        starts = document_starts(document_ids)
        if is_causal:
            return VisibleKeys(starts)
        from_the_end = document_starts(document_ids.flip(1)).flip(1)
        return VisibleKeys(starts, document_ids.shape[1] - from_the_end)

    def within(self, window: int | None, s: int, device: torch.device) -> VisibleKeys:
        """Return the keys that are among the `window` keys before a query's own, in causal attention."""
        if window is None:
            return self
        assert self.ends is None, "a window needs causal attention"
        earliest = (torch.arange(s, device=device)[None] - window).clamp_min_(0)
        starts = earliest if self.starts is None else torch.maximum(self.starts, earliest)
        return self._replace(starts=starts, window=window)

    def expand(self, num_samples: int) -> VisibleKeys:
        """Return the keys of a microbatch whose samples are all like this one sample."""
        if self.starts is None:
            return self
        assert self.ends is None
        return self._replace(starts=self.starts.expand(num_samples, -1).contiguous())

    def part(self, samples: slice) -> VisibleKeys:
        """Return the keys of some of the samples."""
        return self._replace(
            starts=None if self.starts is None else self.starts[samples],
            ends=None if self.ends is None else self.ends[samples],
        )

    def counted_from(self, first: int) -> VisibleKeys:
        """Return the keys in positions that count from `first`, for queries that see no key before it."""
        if first == 0:
            return self
        starts, ends = (None if x is None else F.pad(x[:, first:] - first, (0, first)) for x in self[:2])
        return self._replace(starts=starts, ends=ends)

    def key_slice(self, first: int, last: int, s: int) -> slice:
        """Return the slice of the keys that contains all keys of the queries ``first <= query < last``.

        The slice is known on the host: documents do not narrow it.
        """
        begin = 0 if self.window is None else max(0, first - self.window)
        return slice(begin // _KEY_MULTIPLE * _KEY_MULTIPLE, last if self.ends is None else s)

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return which keys are hidden from each query, ``[b or 1, queries, keys]``."""
        positions = torch.arange(keys.start, keys.stop, device=device)
        rows = slice(queries.start, queries.stop)
        if self.ends is None:
            after = torch.arange(rows.start + 1, rows.stop + 1, device=device)[None]
        else:
            after = self.ends[:, rows]
        hidden = positions >= after[..., None]
        return hidden if self.starts is None else hidden | (positions < self.starts[:, rows, None])


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the sample position of the first token of each token's document, int64 ``[b, s]``.

    A document is a run of equal numbers: the same number after another one is a different document.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_first = document_ids.diff(dim=1, prepend=document_ids[:, :1] - 1) != 0
    return positions.where(is_first, 0).cummax(dim=1).values
