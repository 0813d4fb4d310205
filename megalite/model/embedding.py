"""Embeddings: from token ids to the first hidden states.

Shapes: s sequence, b microbatch, h hidden size, tp = tp.size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.batch.microbatch import Microbatch
from megalite.config import ModelConfig
from megalite.config.model.model_config import num_padding_rows, padded_vocab_size
from megalite.model.norm import build_norm
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.vocab_parallel import VocabParallelEmbedding


class PositionTable(nn.Module):
    """Adds a learned vector for each position; the table is replicated on every rank."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        spec = ParameterSpec(
            (config.num_positions, config.hidden_size), std=config.init_method_std, maps_features=False
        )
        self.weight = new_parameter(spec, context)  # [positions, h]

    def forward(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """Add the positions' vectors to ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel.

        Args:
            position_ids: ``[b, s]``; None for positions within the sample.
        """
        if position_ids is None:
            runs = self.context.position_ranges(x.shape[0])
            own = [self.weight[run.start : run.stop, None] for run in runs]
            return x + (own[0] if len(own) == 1 else torch.cat(own))
        return x + F.embedding(position_ids.t()[self.context.own_tokens(x.shape[0])], self.weight)


class NoPositionTable(nn.Module):
    """Replaces `PositionTable` in models that encode positions in attention."""

    def forward(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return `x` unchanged."""
        return x


class TokenTypeTable(nn.Module):
    """Adds a learned vector for each token type (BERT's segment A or B); replicated on every rank."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        spec = ParameterSpec(
            (config.num_token_types, config.hidden_size), std=config.init_method_std, maps_features=False
        )
        self.weight = new_parameter(spec, context)  # [types, h]

    def forward(self, x: Tensor, token_types: Tensor) -> Tensor:
        """Add the vectors of types ``[b, s]`` to ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel."""
        return x + F.embedding(token_types.t()[self.context.own_tokens(x.shape[0])], self.weight)


class NoTokenTypeTable(nn.Module):
    """Replaces `TokenTypeTable` in models without token types."""

    def forward(self, x: Tensor, token_types: Tensor | None) -> Tensor:
        """Return `x` unchanged."""
        return x


def word_table(config: ModelConfig, context: LayerContext, size: int | None = None) -> VocabParallelEmbedding:
    """Return an embedding of the padded vocabulary, of the hidden size or another one."""
    rows, padding = padded_vocab_size(config, context.tp.size), num_padding_rows(config, context.tp.size)
    columns = config.hidden_size if size is None else size
    return VocabParallelEmbedding(rows, columns, context, std=config.init_method_std, num_padding=padding)


class Multiply(nn.Module):
    """Multiplies by a constant factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return x * self.factor


def multiplier(factor: float) -> nn.Module:
    """Return a module that multiplies by a factor."""
    return nn.Identity() if factor == 1.0 else Multiply(factor)


class Embedding(nn.Module):
    """Computes dropout(norm(m word[tokens] + position + type)); all but the word embedding is optional."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.word = word_table(config, context)
        self.multiply = multiplier(config.embedding_multiplier)
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionTable(config, context) if learned else NoPositionTable()
        has_types = config.num_token_types > 0
        self.token_type = TokenTypeTable(config, context) if has_types else NoTokenTypeTable()
        self.norm = build_norm(config, context) if config.embed_layernorm else nn.Identity()
        self.dropout = Dropout(config.hidden_dropout, context, "embedding.output")

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Map the tokens ``[b, s]`` to ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel."""
        return self.hidden_states(self.words(microbatch), microbatch)

    def words(self, microbatch: Microbatch) -> Tensor:
        """Return m word[tokens], as in `forward`."""
        x: Tensor = self.multiply(self.word(microbatch.tokens.t().contiguous()))
        return x

    def hidden_states(self, words: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the result of `forward` from that of `words`."""
        x = self.token_type(self.position(words, microbatch.position_ids), microbatch.token_types)
        return self.dropout(self.norm(x), microbatch.samples)
