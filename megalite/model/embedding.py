"""From token ids to the first hidden states, and from the last hidden states to the logits of the vocabulary.

A model may also have an embedding for each layer (Gemma 4 E2B and E4B): `EmbeddingForLayers` looks up the
columns of all layers at once, and each layer adds its own ones through an `EmbeddingGate`. Pipeline stages
pass all columns on beside the hidden states.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, l layers, e size of a layer's own
embedding, tp = tp.size. With sequence parallelism every ``[s, b, ...]`` is a rank's slice,
``[s/tp, b, ...]``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.config.model.model_config import num_padding_rows, padded_vocab_size
from megalite.data.microbatch import LayerState, Microbatch
from megalite.model.mlp import GATES
from megalite.model.norm import NORMS, build_norm
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.linear import LinearContext, column_linear
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.tensor_parallel.uncut_linear import UncutLinear
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
        self.position = PositionTable(config, context) if learned else None
        self.token_type = TokenTypeTable(config, context) if config.num_token_types > 0 else None
        self.norm = build_norm(config, context) if config.embed_layernorm else nn.Identity()
        self.dropout = Dropout(config.embedding_drop, context, "embedding.output")

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Map the tokens ``[b, s]`` to ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel."""
        return self.hidden_states(self.words(microbatch), microbatch)

    def words(self, microbatch: Microbatch) -> Tensor:
        """Return m word[tokens], as in `forward`."""
        x: Tensor = self.multiply(self.word(microbatch.tokens.t().contiguous()))
        return x

    def hidden_states(self, words: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the result of `forward` from that of `words`."""
        x = words if self.position is None else self.position(words, microbatch.position_ids)
        x = x if self.token_type is None else self.token_type(x, microbatch.token_types)
        return self.dropout(self.norm(x), microbatch.samples)


class EmbeddingForLayers(Embedding):
    """Computes the first hidden states, and an embedding of each token for each layer.

    With the words' embedding w, the latter is
    (norm(projection(w / sqrt(h))) + sqrt(e) table[tokens]) / sqrt(2).
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        assert config.hidden_size_per_layer_input is not None
        self.num_layers, self.size = config.num_layers, config.hidden_size_per_layer_input
        width, std = self.num_layers * self.size, config.init_method_std
        self.layer_table = word_table(config, context, width)
        self.layer_projection = UncutLinear(
            config.hidden_size, width, context, std=std, fused_rows=(self.size,)
        )
        self.layer_norm = NORMS[config.normalization](config, context, width=self.size)

    def forward(self, microbatch: Microbatch) -> LayerState:  # type: ignore[override]
        """Map the tokens ``[b, s]`` to hidden states ``[s, b, h]`` and the layers' ``[s, b, e]``."""
        words = self.words(microbatch)
        embeddings = dict(enumerate(self.for_layers(words, microbatch)))
        return LayerState(self.hidden_states(words, microbatch), embeddings)

    def for_layers(self, words: Tensor, microbatch: Microbatch) -> tuple[Tensor, ...]:
        """Return the embeddings for all layers from the words' embedding ``[s, b, h]``."""
        projected = self.layer_projection(words * words.shape[-1] ** -0.5)
        looked_up = self.layer_table(microbatch.tokens.t().contiguous())  # [s, b, l e]
        parts = [x.unflatten(-1, (self.num_layers, self.size)) for x in (projected, looked_up)]
        total = (self.layer_norm(parts[0]) + parts[1] * self.size**0.5) * 0.5**0.5  # [s, b, l, e]
        return total.unbind(2)


class EmbeddingGate(nn.Module):
    """Computes norm(projection(act(gate(x)) * embedding)), which a layer adds to its hidden states x.

    The weights are replicated: each rank maps its own positions, and no rank needs the features of another.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        assert config.hidden_size_per_layer_input is not None
        h, e, std = config.hidden_size, config.hidden_size_per_layer_input, config.init_method_std
        self.activation = GATES[config.activation]
        self.gate = UncutLinear(h, e, context, std=std)
        self.projection = UncutLinear(e, h, context, std=std)
        self.norm = build_norm(config, context)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Map ``[s, b, h]`` and the layer's own embedding ``[s, b, e]`` to ``[s, b, h]``."""
        y: Tensor = self.norm(self.projection(self.activation(self.gate(x)) * embedding))
        return y


class SoftCap(nn.Module):
    """Computes c tanh(x / c), which is between -c and c (Gemma Team 2024, section 2)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """Return the capped numbers."""
        return (x / self.cap).tanh_() * self.cap


class OutputLayer(nn.Module):
    """Computes this rank's logits, in the weight's own dtype even if the layers run in fp8.

    Args:
        is_tied: the word embedding's weight is passed to `logits`; otherwise the layer has a weight.
        has_bias: the layer adds a bias of its own to the logits.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, *, is_tied: bool, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.context = LinearContext.of(replace(context, fp8=None))
        spec = ParameterSpec(
            (padded_vocab_size(config, context.tp.size), config.hidden_size),
            Cut("tp", 0),
            std=config.init_method_std,
            num_padding=num_padding_rows(config, context.tp.size),
            is_vocabulary=True,
        )
        self.multiply = multiplier(config.logit_multiplier / config.width_ratio)
        cap = config.final_logit_softcapping
        self.bound = nn.Identity() if cap is None else SoftCap(cap)
        self.weight = None if is_tied else new_parameter(spec, context)  # [v/tp, h]
        of_rows = replace(spec, full_shape=spec.full_shape[:1], std=0.0, decay=False)
        self.bias = new_parameter(of_rows, context) if has_bias else None  # [v/tp]

    def logits(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, v/tp]``; weight and bias are ``[v/tp, h]`` and ``[v/tp]``."""
        logits = column_linear(self.multiply(x), weight, bias, self.context)
        if self.bias is not None:  # a GEMM with a bias returns a view, which the cross-entropy cannot change
            logits.add_(self.bias)
        bounded: Tensor = self.bound(logits)
        return bounded


class VocabHead(nn.Module):
    """Computes the logits of norm(x), with a weight that no embedding shares."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.norm = build_norm(config, context)
        self.output = OutputLayer(config, context, is_tied=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, v/tp]``."""
        assert self.output.weight is not None
        return self.output.logits(self.norm(x), self.output.weight)
