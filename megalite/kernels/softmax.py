"""Compute the softmax of attention scores with scale, ALiBi, documents and dropout in one kernel.

`VisibleKeys` says which keys each query of attention sees. The softmax is causal, unless `ends` gives the
last key of each query.

A block has the scores of some consecutive queries with consecutive keys, which contain all keys that these
queries see. The operators' positions count from the block's first key. Both operators work in place, so a
block of scores is the only memory that they need. Keys that a query does not see are not read. The backward
takes the scores again, and one number per query from the forward; weights and dropout masks are not saved.

Shapes: b samples, n heads, rows (queries of the block), keys (of the block), s the whole sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.data.document_assignment import Assignment
from megalite.kernels.dropout import keep_threshold
from megalite.kernels.library import define, no_result
from megalite.kernels.philox import signed64

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


_MAX_KEYS = 1024  # keys of a row that a program of the Triton kernels holds at once


class Drop(NamedTuple):
    """Dropout of attention weights by counter.

    Weight (query i, key j) of head h has the index ``base + (h * s + i) * s + j`` within its sample, as in
    `megalite.kernels.dropout`.

    Attributes:
        p: probability of a zero; 0 drops nothing.
        key: 64 bits, from `site_key(seed, site's name)`.
        sample_numbers: int64 ``[b]``, the number of each sample in the run.
        base: index of the first weight of the first head.
        key_tensor: replaces `key` in a graph of torch.compile, which is reused with other keys.
    """

    p: float
    key: int
    sample_numbers: Tensor
    base: int = 0
    key_tensor: Tensor | None = None


class CausalSoftmax(NamedTuple):
    """Softmax of scale * scores + slope * (key - query) over a query's visible keys, then dropout.

    With a cap c, c tanh(scale * scores / c) replaces the scaled scores (Gemma Team 2024, section 2).

    An attention sink is one more logit per head in the sum of the softmax, with a value of zero: a weight is
    exp(x) / (sum of exp + exp(sink)), as in GPT-OSS (OpenAI 2025, arXiv 2508.10925). Attention with a sink is
    attention without it, times sigmoid(log of the sum - sink). Any kernel that returns the logarithms of the
    sums computes without sinks, and `finish_` changes its results. A backward that takes the output and
    these logarithms from the forward needs no change if they include the sink.

    Attributes:
        seq_length: length of the whole sequence, s.
        scale: factor of the scores.
        slopes: slopes of ALiBi, fp64 ``[n]``; None without bias.
        visible: keys that each query sees, by `starts` and `ends`.
        drop: dropout of the weights; None without dropout.
        cap: bound of the scaled scores; None without bound.
        parameters: per-head tensors that the sums also depend on, ``[n]``: logits of the sinks, or none.
    """

    seq_length: int
    scale: float
    slopes: Tensor | None = None
    visible: VisibleKeys = VisibleKeys()
    drop: Drop | None = None
    cap: float | None = None
    parameters: tuple[Tensor, ...] = ()

    def weights_(self, scores: Tensor, first: int, first_key: int = 0) -> Tensor:
        """Replace scores with weights, and with zeros for keys that are not visible.

        Args:
            scores: ``[b, n, rows, keys]``, contiguous, fp64, fp32, bf16 or fp16; the computation is in at
                least fp32.
            first: position of the first query in the sequence.
            first_key: position of the first key.

        Returns:
            Logarithm of each query's sum of exponentials, ``[b, n, rows]``, in at least fp32.
        """
        self.cap_(scores)
        result: Tensor = torch.ops.megalite.causal_softmax_(scores, *self.arguments(first, first_key))
        return result

    def backward_(
        self, scores: Tensor, grad: Tensor, log_sums: Tensor, first: int, first_key: int = 0
    ) -> None:
        """Replace scores with weights, and the weights' gradient with the gradient of the unscaled scores.

        Args:
            scores: as passed to `weights_`.
            grad: gradient of the weights, of the same shape.
            log_sums: the result of `weights_`.
        """
        self.cap_(scores)
        slope = self.cap_slope(scores)
        torch.ops.megalite.causal_softmax_backward_(scores, grad, log_sums, *self.arguments(first, first_key))
        if slope is not None:
            grad.mul_(slope)

    def cap_(self, scores: Tensor) -> None:
        """Replace scores with capped scaled scores; do nothing without a cap."""
        if self.cap is not None:
            scores.mul_(self.scale / self.cap).tanh_().mul_(self.cap)

    def cap_slope(self, capped: Tensor) -> Tensor | None:
        """Return the derivative of each capped score by its unscaled score; None without a cap."""
        if self.cap is None:
            return None
        return (capped / self.cap).square_().neg_().add_(1.0).mul_(self.scale)

    def part(self, samples: slice, heads: slice) -> CausalSoftmax:
        """Return the softmax for some of the samples and heads."""
        drop = self.drop
        if drop is not None:
            drop = drop._replace(
                sample_numbers=drop.sample_numbers[samples],
                base=drop.base + heads.start * self.seq_length**2,
            )
        return self._replace(
            slopes=None if self.slopes is None else self.slopes[heads],
            visible=self.visible.part(samples),
            drop=drop,
            parameters=tuple(parameter[heads] for parameter in self.parameters),
        )

    def arguments(self, first: int, first_key: int = 0) -> tuple[Any, ...]:
        """Return the operators' arguments after the scores, with positions from the block's first key on.

        Capped scores are scaled.
        """
        scale = self.scale if self.cap is None else 1.0
        seen = self.slopes, *self.visible.counted_from(first_key)[:2]
        where = first - first_key, self.seq_length
        if self.drop is None or self.drop.p == 0.0:
            return *seen, None, scale, 0.0, 0, 0, *where
        p, key, samples, base, _ = self.drop
        base += first_key * (self.seq_length + 1)
        return *seen, samples.contiguous(), scale, p, signed64(key), base, *where


def biased_scores(
    scores: Tensor,
    slopes: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    scale: float,
    first: int,
    first_key: int = 0,
) -> Tensor:
    """Return scaled scores in at least fp32, with -inf for keys that are not visible."""
    queries, keys = range(first, first + scores.shape[2]), range(first_key, first_key + scores.shape[3])
    x = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if slopes is not None:
        rows, columns = (torch.arange(each.start, each.stop, device=x.device) for each in (queries, keys))
        x += slopes.to(x.dtype)[:, None, None] * (columns - rows[:, None])
    hidden = VisibleKeys(starts, ends).hidden(queries, keys, x.device)  # [b or 1, rows, keys]
    return x.masked_fill_(hidden[:, None], -torch.inf)


def keep_factors(x: Tensor, samples: Tensor | None, p: float, key: int, *place: int) -> Tensor | float:
    """Return dropout's factor of each weight, 0 or 1 / (1 - p).

    Work on one head at a time, because dropout's index counts all weights of a head before the next head.
    """
    if p == 0.0 or samples is None:
        return 1.0
    base, first, seq_length = place
    ones = x.new_ones(()).expand(x.shape[2], x.shape[0], x.shape[3])  # [rows, b, keys]
    heads = [
        torch.ops.megalite.dropout(
            ones, samples, p, key, base + (h * seq_length + first) * seq_length, seq_length
        )
        for h in range(x.shape[1])
    ]
    return torch.stack(heads).permute(2, 0, 1, 3)


def reference(scores: Tensor, *arguments: Any) -> Tensor:
    """Implement `CausalSoftmax.weights_` in plain PyTorch, with the same dropout masks to the bit.

    Args:
        arguments: result of `CausalSoftmax.arguments`.
    """
    slopes, starts, ends, samples, scale, p, key, base, first, seq_length = arguments
    x = biased_scores(scores, slopes, starts, ends, scale, first)
    log_sums = x.logsumexp(-1)
    weights = (x - log_sums[..., None]).exp_()
    scores.copy_(weights * keep_factors(x, samples, p, key, base, first, seq_length))
    return log_sums


def reference_backward(scores: Tensor, grad: Tensor, log_sums: Tensor, *arguments: Any) -> None:
    """Implement `CausalSoftmax.backward_` in plain PyTorch."""
    slopes, starts, ends, samples, scale, p, key, base, first, seq_length = arguments
    x = biased_scores(scores, slopes, starts, ends, scale, first)
    is_hidden = x.isneginf()
    weights = (x - log_sums[..., None]).exp_()
    keep = keep_factors(x, samples, p, key, base, first, seq_length)
    g = grad.to(x.dtype).masked_fill(is_hidden, 0.0) * keep
    mean = (weights * g).sum(-1, keepdim=True)
    grad.copy_((weights * (g - mean)).mul_(scale))
    scores.copy_(weights * keep)


def launch(scores: Tensor, *arguments: Any) -> Tensor:
    """Run the Triton kernel of the forward."""
    log_sums = _fake(scores)
    _launch("softmax_kernel", (scores, log_sums), *arguments)
    return log_sums


def launch_backward(scores: Tensor, grad: Tensor, log_sums: Tensor, *arguments: Any) -> None:
    """Run the Triton kernel of the backward."""
    _launch("softmax_backward_kernel", (scores, grad, log_sums), *arguments)


def _launch(name: str, tensors: tuple[Tensor, ...], *arguments: Any) -> None:
    from megalite.kernels import triton_random as kernels  # imports Triton, which a CPU does not need

    scores = tensors[0]
    slopes, starts, ends, samples, scale, p, key, base, first, seq_length = arguments
    b, n, rows, keys = scores.shape
    if scores.numel() == 0:
        return
    documents = (None if each is None else each.contiguous() for each in (starts, ends))
    with torch.cuda.device_of(scores):
        getattr(kernels, name)[rows, n, b](
            *tensors,
            *(slopes, *documents, samples if p else None),
            *(n, rows, keys, first, seq_length, scale, key, base, keep_threshold(p), 1.0 / (1.0 - p)),
            WIDE=kernels.wide_type(scores.dtype),
            ALIGNED=seq_length % 4 == 0 and base % 4 == 0,
            N=min(_MAX_KEYS, max(4, 1 << (keys - 1).bit_length())),
            enable_fp_fusion=True,  # Triton 3.9 warns without it: 3.10 plans another default
        )


def _fake(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape[:3], dtype=torch.promote_types(scores.dtype, torch.float32))


_REST = (
    "Tensor? slopes, Tensor? starts, Tensor? ends, Tensor? samples, float scale, float p, int key, int base, "
    "int first, int seq_length"
)

define("causal_softmax_", f"(Tensor(a!) scores, {_REST}) -> Tensor", reference, _fake, triton=launch)
define(
    "causal_softmax_backward_",
    f"(Tensor(a!) scores, Tensor(b!) grad, Tensor log_sums, {_REST}) -> ()",
    reference_backward,
    no_result,
    triton=launch_backward,
)


def share_of_keys(log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of the keys in each sum of exponentials with the parameter, ``[b, n, s, 1]``.

    Args:
        log_sums: ``[b, n, s]``, logarithm of each query's sum over the keys alone.
        sinks: the parameter of the softmax, ``[n]``.
    """
    return (log_sums - sinks.to(log_sums.dtype)[:, None]).sigmoid()[..., None]


def finish_(out: Tensor, log_sums: Tensor, *parameters: Tensor) -> None:
    """Change attention with the keys alone in place to that of the softmax with these parameters.

    Args:
        out: ``[b, n, s, d]``.
        log_sums: as in `share_of_keys`.
    """
    for sinks in parameters:
        out.mul_(share_of_keys(log_sums, sinks))
        log_sums.copy_(torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None]))


def parameter_gradient(grad: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of a parameter of the softmax, ``[n]``.

    A sink has weight w = exp(sink - log_sums) and value 0, so the softmax's gradient is -w (grad . out).

    Args:
        grad: gradient of `out`.
        out, log_sums: the results of `finish_`.
    """
    weights = (sinks.to(log_sums.dtype)[:, None] - log_sums).exp()  # [b, n, s]
    products = (grad.to(log_sums.dtype) * out).sum(-1)
    return -(weights * products).sum((0, 2)).to(sinks.dtype)
