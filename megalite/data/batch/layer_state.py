"""Values that blocks, layers and stages pass on: hidden states, keys for later layers, terms of the loss.

Shapes: s sequence, b microbatch, h hidden size, l layers, e size of a layer's own embedding, g' key/value
heads of a rank, d head size. With sequence parallelism every ``[s, b, h]`` is a rank's slice,
``[s/tp, b, h]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    bias: nn.Parameter | None
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
        """Return the next layer's input.

        Args:
            output: the layer's output.
            hidden: its hidden states.
        """
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
