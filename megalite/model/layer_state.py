"""What blocks, layers and stages of a model pass on.

Shapes: s sequence, b microbatch, h hidden size, l layers, e size of a layer's own embedding, g' key/value
heads of a rank, d head size. With sequence parallelism every ``[s, b, h]`` is a rank's slice,
``[s/tp, b, h]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.batch.loss_terms import SharedKeys, Terms, WithTerms, add_terms


class BlockOutput(NamedTuple):
    """What a layer adds to its input: ``x + bias``, which the kernel of the residual connection adds.

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
    """What a layer gets from the layers before it, and from the stage before its own.

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
