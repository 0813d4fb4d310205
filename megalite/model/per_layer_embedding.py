"""Embeddings for each layer: a layer adds an embedding of its own of each token (Gemma 4 E2B and E4B).

`EmbeddingForLayers` looks up the columns of all layers at once, and each layer adds its own ones through an
`EmbeddingGate`. Pipeline stages pass all columns on beside the hidden states.

Shapes: s sequence, b microbatch, h hidden size, l layers, e size of a layer's own embedding, tp = tp.size.
With sequence parallelism every s is s/tp.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.batch.microbatch import Microbatch
from megalite.config import ModelConfig
from megalite.model.embedding import Embedding, word_table
from megalite.model.layer_state import LayerState
from megalite.model.mlp import GATES
from megalite.model.norm import NORMS, build_norm
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.uncut_linear import UncutLinear


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
