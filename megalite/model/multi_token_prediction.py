"""Multi-token prediction: modules after the last layer that each predict one token further ahead.

(DeepSeek-AI 2024, DeepSeek-V3, section 2.2.) The modules share the word embedding and the output layer with
the model. Module k = 1, 2, … continues from the hidden states of module k - 1, and the first from those after
the final norm:

    x = projection([norm(embedding(token i + k)), norm(h)])
    h = norm(layer(x))                                       predicts token i + k + 1

Shapes: s sequence, b microbatch, h hidden size, d modules, tp = tp.size. With sequence parallelism every
``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.config.model.transformer import NORMALIZED
from megalite.data.microbatch import (
    LossTerm,
    Microbatch,
    SampleNumbers,
    Terms,
    WithTerms,
    later_real_token,
    later_token,
)
from megalite.model.embedding import multiplier
from megalite.model.experts import names_of_terms
from megalite.model.layer import TransformerLayer
from megalite.model.norm import build_norm
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.utils.wrapping import wrap_point


def mtp_loss_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the modules' terms of the loss."""
    return tuple(f"mtp_{ahead}_loss" for ahead in range(1, config.mtp_num_layers + 1))


def mtp_router_terms(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the terms of the routers in the modules' layers."""
    return tuple(
        _router_term(ahead, name)
        for ahead in range(1, config.mtp_num_layers + 1)
        if config.layer_spec(config.num_layers + ahead - 1).experts is not None
        for name in names_of_terms(config)
    )


def _router_term(ahead: int, name: str) -> str:
    return f"mtp_{ahead}_{name}"


class JoiningLinear(nn.Module):
    """Maps an embedding and a hidden state, one after the other, to a hidden state.

    The weight is replicated on every rank: with sequence parallelism each rank maps its own positions, and no
    rank needs the features of another one.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        spec = ParameterSpec(
            (config.hidden_size, 2 * config.hidden_size),
            std=config.init_method_std,
            width_ratio=config.width_ratio,
        )
        self.weight = new_parameter(spec, context)  # [h, 2 h]

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Map two ``[s, b, h]`` to ``[s, b, h]``."""
        return F.linear(torch.cat((embedded, hidden), dim=-1), self.weight)


class MultiTokenModule(nn.Module):
    """Computes the hidden states that predict one token further ahead than those of the module before it.

    Args:
        core: attention core of the stage.
        number: number of the module, from 0. Its layer is of the last layer's kind.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, number: int) -> None:
        super().__init__()
        self.multiply = multiplier(config.embedding_multiplier)
        self.embedding_dropout = Dropout(config.embedding_drop, context, f"mtp.{number}.embedding")
        self.embedding_norm = build_norm(config, context)
        self.hidden_norm = build_norm(config, context)
        self.projection = JoiningLinear(config, context)
        self.layer = TransformerLayer(config, context, core, config.num_layers + number)
        is_post_norm = "sum" in NORMALIZED[config.norm_position]
        self.final_norm = nn.Identity() if is_post_norm else build_norm(config, context)

    @wrap_point
    def forward(
        self, embedded: Tensor, hidden: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo
    ) -> tuple[Tensor, Terms]:
        """Map the later tokens' embeddings and the hidden states, both ``[s, b, h]``, to ``[s, b, h]``.

        Returns:
            The hidden states after the norm, and the terms of the loss that the layer computes.
        """
        embedded = self.embedding_dropout(self.multiply(embedded), sample_numbers)
        x = self.projection(self.embedding_norm(embedded), self.hidden_norm(hidden))
        y, terms, _ = WithTerms.of(self.layer(x, sample_numbers, positions))
        return self.final_norm(y), terms


class MultiTokenPrediction(nn.ModuleList):
    """Computes the hidden states that predict the tokens after the next one, with one module for each."""

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore) -> None:
        super().__init__(
            MultiTokenModule(config, context, core, number) for number in range(config.mtp_num_layers)
        )
        self.term_names = mtp_loss_names(config)
        self.scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        self.has_experts = config.has_experts

    def forward(
        self, word: nn.Module, hidden: Tensor, microbatch: Microbatch, inputs: Sequence[Any]
    ) -> tuple[Tensor, Terms]:
        """Return the hidden states of all modules and the terms of the loss that their layers compute.

        Args:
            word: word embedding.
            hidden: ``[s, b, h]``, after the model's final norm.
            inputs: arguments of each layer besides x.

        Returns:
            ``[s, (1 + d) b, h]``: the given hidden states, then those of each module.
        """
        assert microbatch.later_tokens is not None
        tokens = microbatch.later_tokens.permute(2, 1, 0).flatten(1)  # [s, d b]
        embedded = word(tokens).chunk(len(self), dim=1)
        sample_numbers, positions = inputs
        terms: dict[str, LossTerm] = {}
        states = [hidden]
        for ahead, (module, each) in enumerate(zip(self, embedded, strict=True), 1):
            if self.has_experts:
                assert microbatch.later_real is not None
                positions = positions._replace(is_real=microbatch.later_real[:, ahead - 1].t())
            state, more = module(each, states[-1], sample_numbers, positions)
            states.append(state)
            for name, term in more.items():
                terms[_router_term(ahead, name)] = term._replace(per=later_real_token(ahead))
        return torch.cat(states, dim=1), terms

    def targets(self, microbatch: Microbatch) -> Tensor:
        """Return the tokens to predict from the result of `forward`, ``[s, (1 + d) b]``."""
        assert microbatch.later_labels is not None
        return torch.cat((microbatch.labels.t(), microbatch.later_labels.permute(2, 1, 0).flatten(1)), dim=1)

    def terms(self, losses: Tensor, microbatch: Microbatch) -> Terms:
        """Return the modules' terms of the loss.

        Args:
            losses: loss of each module's token, ``[s, d b]``.
        """
        assert microbatch.later_mask is not None
        masks = microbatch.later_mask.permute(1, 2, 0)  # [d, s, b]
        by_module = zip(self.term_names, losses.chunk(len(self), dim=1), masks, strict=True)
        return {
            name: LossTerm(each.where(mask, 0.0).sum(), per=later_token(ahead), scale=self.scale)
            for ahead, (name, each, mask) in enumerate(by_module, 1)
        }
