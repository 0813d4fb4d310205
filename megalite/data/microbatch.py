"""A microbatch, as it goes from the data loader to the pipeline's stages, and what stages compute from it.

Blocks, layers and stages pass on hidden states, keys for later layers and terms of the loss.

Shapes: b samples of the microbatch, s tokens of a sequence that this rank holds, S all tokens of a sequence,
d modules of multi-token prediction (in `SharedKeys`, size of a head), h hidden size, l layers, e size of a
layer's own embedding, g' key/value heads of a rank. With sequence parallelism every ``[s, b, h]`` is a rank's
slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.data.document_assignment import Assignment


class AssignedSamples(NamedTuple):
    """Tokens that a rank holds of samples whose documents were assigned to ranks.

    Attributes:
        numbers: int64 ``[b]``, the samples' numbers in the whole run.
        ranges: positions of the rank's tokens in each sample, in the order of the tokens.
    """

    numbers: Tensor
    ranges: tuple[tuple[range, ...], ...]


SampleNumbers = Tensor | AssignedSamples
"""The numbers of a microbatch's samples, int64 ``[b]``; with positions where samples differ in those that the
rank holds."""


def numbers_of(samples: SampleNumbers) -> Tensor:
    """Return the samples' numbers in the whole run, int64 ``[b]``."""
    return samples.numbers if isinstance(samples, AssignedSamples) else samples


@dataclass(frozen=True)
class Microbatch:
    """Input of one forward pass.

    Attributes:
        tokens: int64 ``[b, s]``, the inputs.
        labels: int64 ``[b, s]``, the token to predict at each input; ``[b, k]`` if k positions are selected.
        sample_numbers: int64 ``[b]``, the samples' numbers in the whole run; they are keys of the dropout.
        position_ids: int64 ``[b, s]``, positions within documents; None for positions within the sample.
        document_ids: int64 ``[b, S]``, equal within a document; None if attention crosses documents. Padding
            is a document of its own. They stay complete, because a query may see keys of other ranks.
        loss_mask: bool, shaped like `labels`, False for tokens without a loss; None if all tokens have one.
        is_real: bool ``[b, s]``, False for padding; None without padding.
        label_positions: int64 ``[b, k]``, which of the s tokens to predict; None for all.
        token_types: int64 ``[b, s]``, 0 in the first segment of a sample and 1 in the second; None if the
            model has no token types.
        order_labels: int64 ``[b]``, 1 if the segments of a sample are swapped; None for a model that does not
            predict their order.
        later_tokens: int64 ``[b, d, s]``, the tokens 1 to d positions after each token, 0 after the sample;
            None without multi-token prediction.
        later_labels: int64 ``[b, d, s]``, the labels of these tokens.
        later_mask: bool ``[b, d, s]``, whether these labels have a loss.
        later_real: bool ``[b, d, s]``, whether there are these tokens: not padding, nor after the sample or
            the document.
        assignments: for each sample, the positions that each context-parallel rank holds, if its documents
            were assigned; None if the order of the ranks says it.
        own_runs: those that this rank holds.
    """

    tokens: Tensor
    labels: Tensor
    sample_numbers: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    loss_mask: Tensor | None = None
    is_real: Tensor | None = None
    label_positions: Tensor | None = None
    token_types: Tensor | None = None
    order_labels: Tensor | None = None
    later_tokens: Tensor | None = None
    later_labels: Tensor | None = None
    later_mask: Tensor | None = None
    later_real: Tensor | None = None
    assignments: tuple[Assignment, ...] | None = None
    own_runs: tuple[tuple[range, ...], ...] | None = None

    @property
    def samples(self) -> SampleNumbers:
        """Return the samples' numbers, with the positions that the rank holds if these differ."""
        if self.own_runs is None:
            return self.sample_numbers
        return AssignedSamples(self.sample_numbers, self.own_runs)

    @staticmethod
    def of(text: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Split int64 ``[b, s + 1]`` tokens into inputs and labels."""
        return Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), sample_numbers)

    def in_sequences(self, count: int) -> Microbatch:
        """Return the microbatch with each sample cut into `count` sequences of ``s / count`` tokens.

        The sequences of a sample follow each other: the result is ``[count b, s / count]``. Their numbers and
        positions are those of samples of this length.
        """
        if count == 1:
            return self
        s = self.tokens.shape[1]
        names = ["tokens", "labels", "document_ids", "loss_mask", "is_real"]
        cut = {name: x.reshape(-1, s // count) for name in names if (x := getattr(self, name)) is not None}
        if self.position_ids is not None:  # of documents, which begin again with a sequence
            positions = self.position_ids.reshape(-1, s // count)
            cut["position_ids"] = positions.minimum(torch.arange(s // count, device=positions.device))
        numbers = self.sample_numbers[:, None] * count
        numbers = numbers + torch.arange(count, device=numbers.device)
        return replace(self, **cut, sample_numbers=numbers.flatten())

    def with_later_tokens(self, depth: int) -> Microbatch:
        """Return the microbatch of whole samples with the tokens and labels up to `depth` positions later.

        A later label has a loss if it has one at its own position, and its input is of the same document.
        """
        if depth == 0:
            return self
        mask = torch.ones_like(self.labels, dtype=torch.bool) if self.loss_mask is None else self.loss_mask
        real = torch.ones_like(self.tokens, dtype=torch.bool) if self.is_real is None else self.is_real
        later_mask, later_real = _later(mask, depth), _later(real, depth) & real[:, None]
        if self.document_ids is not None:
            is_same = _later(self.document_ids, depth) == self.document_ids[:, None]
            later_mask, later_real = later_mask & is_same, later_real & is_same
        return replace(
            self,
            later_tokens=_later(self.tokens, depth),
            later_labels=_later(self.labels, depth),
            later_mask=later_mask,
            later_real=later_real,
        )

    def cut(self, runs: Sequence[range]) -> Microbatch:
        """Return the microbatch with the tokens at these positions of each sample."""
        if sum(map(len, runs)) == self.tokens.shape[1]:
            return self
        own: dict[str, Any] = {name: _at(x, runs) for name, x in self._by_position().items()}
        result = replace(self, **own)
        return result if self.label_positions is None else result._predicting_in(runs)

    def padded_from(self, end: int) -> Microbatch:
        """Return the microbatch in which the samples with numbers from `end` on are padding."""
        is_used = (self.sample_numbers < end)[:, None]
        padded: dict[str, Any] = {
            name: is_used & (torch.ones_like(like, dtype=torch.bool) if mask is None else mask)
            for name, like in (("loss_mask", self.labels), ("is_real", self.tokens))
            for mask in [getattr(self, name)]
        }
        for name in ("later_mask", "later_real"):
            if (mask := getattr(self, name)) is not None:
                padded[name] = is_used[:, None] & mask
        return replace(self, **padded)

    def rank_part(self, assignments: tuple[Assignment, ...], rank: int) -> Microbatch:
        """Return the microbatch of whole samples with the tokens that a rank gets by these assignments.

        Attention reads the documents in the assignments, and recurrent layers read `document_ids`. Embeddings
        read `position_ids`, which are set: samples differ in the positions that the rank holds.
        """
        assert self.label_positions is None
        runs = tuple(tuple(run.positions for run in each.ranks[rank]) for each in assignments)
        held = torch.tensor([each.positions_of(rank) for each in assignments])  # [b, s]
        whole = {"position_ids": torch.arange(self.tokens.shape[1]).expand_as(self.tokens)}
        own: dict[str, Any] = {name: _at_each(x, held) for name, x in (whole | self._by_position()).items()}
        return replace(self, **own, assignments=assignments, own_runs=runs)

    def _by_position(self) -> dict[str, Tensor]:
        """Return the tensors whose last dim are the positions of the samples, by name."""
        names = ["tokens", "position_ids", "is_real", "token_types"]
        names += ["later_tokens", "later_labels", "later_mask", "later_real"]
        if self.label_positions is None:
            names += ["labels", "loss_mask"]
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def _predicting_in(self, runs: Sequence[range]) -> Microbatch:
        """Return the microbatch with the selected ones of these positions, counted among them.

        Samples differ in their number. All keep as many columns as there are positions, without a loss in
        the columns of other positions.
        """
        assert self.label_positions is not None and self.loss_mask is not None
        positions, length = torch.full_like(self.label_positions, -1), 0
        for run in runs:
            is_in_run = (self.label_positions >= run.start) & (self.label_positions < run.stop)
            positions = torch.where(is_in_run, self.label_positions - run.start + length, positions)
            length += len(run)
        is_own = self.loss_mask & (positions >= 0)
        columns = is_own.logical_not().char().argsort(dim=1, stable=True)[:, :length]  # its own come first
        return replace(
            self,
            labels=self.labels.gather(1, columns),
            loss_mask=is_own.gather(1, columns),
            label_positions=positions.clamp(0, length - 1).gather(1, columns),
        )

    def pin_memory(self) -> Microbatch:
        """Copy to pinned memory. A copy from pageable memory would wait for all work on the GPU."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Microbatch:
        """Start the copy to the device on its current stream. torch keeps pinned memory until it is done."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Microbatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        mapped: dict[str, Any] = {name: function(x) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **mapped)


def _at(x: Tensor, runs: Sequence[range]) -> Tensor:
    """Return what ``[..., s]`` has at these positions, contiguous."""
    return torch.cat([x[..., run.start : run.stop] for run in runs], dim=-1)


def _at_each(x: Tensor, positions: Tensor) -> Tensor:
    """Return what ``[b, ..., S]`` has at the positions ``[b, s]`` of each sample, ``[b, ..., s]``."""
    index = positions if x.dim() == 2 else positions[:, None].expand(-1, x.shape[1], -1)
    return x.gather(-1, index)


def _later(x: Tensor, depth: int) -> Tensor:
    """Return what ``[b, s]`` has 1 to `depth` positions later, ``[b, depth, s]``; 0 after the sample."""
    return torch.stack([F.pad(x[:, ahead:], (0, ahead)) for ahead in range(1, depth + 1)], dim=1)


LM_LOSS = "lm_loss"
"""Name of the loss of the predicted tokens."""
Z_LOSS = "z_loss"
"""Name of the term of --z-loss-coeff."""


REAL_TOKEN = "real token"
"""Name in `LossTerm.per` of the tokens that are not padding."""


def later_token(ahead: int) -> str:
    """Return the name in `LossTerm.per` of the tokens whose label so many positions later has a loss."""
    return f"later-{ahead} token"


def later_real_token(ahead: int) -> str:
    """Return the name in `LossTerm.per` of the tokens with a token so many positions later."""
    return f"later-{ahead} {REAL_TOKEN}"


class LossTerm(NamedTuple):
    """One summand of the loss: ``scale * total / n``, where n counts the units of the global batch.

    Attributes:
        total: sum over the microbatch, a scalar.
        per: the units: "token" for the tokens that have a loss, "sample" for samples, `REAL_TOKEN`,
            `later_token` or `later_real_token`.
        scale: weight of the term in the loss.
    """

    total: Tensor
    per: str = "token"
    scale: float = 1.0

    def value(self, divisor: float | Tensor) -> Tensor:
        """Return the microbatch's part of the summand, if n is `divisor`."""
        mean = self.total / divisor
        return mean if self.scale == 1.0 else mean * self.scale


Terms = Mapping[str, LossTerm]
SharedKeys = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values that later layers attend to, by the number of the layer that computes them."""


class WithTerms(NamedTuple):
    """Output of a layer or a stage that also computes terms of the loss, or keys for later layers.

    Attributes:
        hidden: ``[s, b, h]``; None on the last stage.
        terms: terms by name; a layer's are added to terms of the same name from other layers.
        keys: a layer's keys and values for later layers of its stage.
    """

    hidden: Tensor | None
    terms: Terms
    keys: SharedKeys = MappingProxyType({})

    @staticmethod
    def of(output: Tensor | WithTerms) -> WithTerms:
        """Return the output of a layer, or of a stage before the last."""
        return output if isinstance(output, WithTerms) else WithTerms(output, {})

    @staticmethod
    def if_any(hidden: Tensor, terms: Terms, keys: SharedKeys) -> Tensor | WithTerms:
        """Return the output of a layer that computes these terms and keys, which can be none."""
        # By length: torch.compile takes an empty mapping proxy for a true value.
        return WithTerms(hidden, terms, keys) if len(terms) or len(keys) else hidden

    @staticmethod
    def of_last(output: Tensor | WithTerms) -> WithTerms:
        """Return the output of the last stage: a tensor is the total of `LM_LOSS`."""
        return output if isinstance(output, WithTerms) else WithTerms(None, {LM_LOSS: LossTerm(output)})

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors at which backward begins."""
        if self.hidden is not None:
            yield self.hidden
        for term in self.terms.values():
            yield term.total

    @property
    def requires_grad(self) -> bool:
        """Return whether one of the tensors requires a gradient, like a single output."""
        return any(tensor.requires_grad for tensor in self.tensors())

    def register_hook(self, hook: Callable[[Tensor], Any]) -> None:
        """Call the hook with the gradient of each tensor, like the hook of a single output."""
        for tensor in self.tensors():
            if tensor.requires_grad:
                tensor.register_hook(hook)


def add_terms(terms: Terms, more: Terms) -> Terms:
    """Return all terms; those of one name are added."""
    result = dict(terms)
    for name, term in more.items():
        if name in result:
            assert result[name][1:] == term[1:], f"the terms {name} differ in `per` or `scale`"
            term = term._replace(total=result[name].total + term.total)
        result[name] = term
    return result


def largest_total(terms: Terms) -> Tensor:
    """Return the largest magnitude of the terms' totals, a scalar."""
    return torch.stack([term.total.detach() for term in terms.values()]).abs().amax()


class BlockOutput(NamedTuple):
    """Output of a block, ``x + bias``, which the kernel of the residual connection adds to the input.

    Attributes:
        x: ``[s, b, h]``.
        bias: ``[h]``; None if the block has no bias.
        terms: terms of the loss that the block computes.
        keys: keys and values that later layers attend to.
    """

    x: Tensor
    bias: Tensor | None
    terms: Terms = MappingProxyType({})
    keys: SharedKeys = MappingProxyType({})


class LayerState(NamedTuple):
    """State that a layer reads, from the layers before it and from the stage before its own.

    Attributes:
        hidden: ``[s, b, h]``.
        embeddings: each layer's own embedding of the tokens, ``[s, b, e]``, by the layer's number; empty if
            layers have none.
        keys: keys and values of earlier layers of the stage that later ones attend to, twice
            ``[s, b, g', d]``, by the earlier layer's number.
        terms: terms of the loss that layers of the stage have computed.
    """

    hidden: Tensor
    embeddings: Mapping[int, Tensor] = MappingProxyType({})
    keys: SharedKeys = MappingProxyType({})
    terms: Terms = MappingProxyType({})

    @staticmethod
    def of(output: Tensor | LayerState) -> LayerState:
        """Return the output of any embedding as the first layer's input."""
        return output if isinstance(output, LayerState) else LayerState(output)

    def after(self, output: WithTerms, hidden: Tensor) -> LayerState:
        """Return the next layer's input."""
        return self._replace(
            hidden=hidden, keys={**self.keys, **output.keys}, terms=add_terms(self.terms, output.terms)
        )

    def message(self) -> Tensor:
        """Return what the next stage receives: the hidden states and all embeddings, ``[s, b, h + l e]``.

        Every stage sends the embeddings for all layers, so that all messages have one shape.
        """
        return torch.cat((self.hidden, *self.embeddings.values()), dim=-1) if self.embeddings else self.hidden

    @staticmethod
    def of_message(message: Tensor, num_layers: int, size: int | None) -> LayerState:
        """Return the first layer's input from a `message`.

        Args:
            size: e; None if layers have no embeddings of their own.
        """
        if size is None:
            return LayerState(message)
        hidden, *embeddings = message.split((message.shape[-1] - num_layers * size, *[size] * num_layers), -1)
        return LayerState(hidden, dict(enumerate(embeddings)))
