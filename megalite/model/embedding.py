"""From token ids to the first hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.norm import build_norm
from megalite.parallel.layers import VocabParallelEmbedding
from megalite.parallel.rng import Dropout
from megalite.parallel.shard import ParameterSpec, Placement, new_parameter


class PositionTable(nn.Module):
    """A learned vector for each position, whole on every rank."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        spec = ParameterSpec((config.num_positions, config.hidden_size), std=config.init_method_std)
        self.weight = new_parameter(spec, place)  # [positions, h]

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``."""
        return x + self.weight[: x.shape[0], None]


def word_table(config: ModelConfig, place: Placement) -> VocabParallelEmbedding:
    """The table of word vectors over the padded vocabulary."""
    rows = config.padded_vocab_size(place.tp.size)
    return VocabParallelEmbedding(rows, config.hidden_size, place, std=config.init_method_std)


class Embedding(nn.Module):
    """Word vectors, with learned positions and BLOOM's embedding norm where the config has them."""

    def __init__(self, config: ModelConfig, place: Placement, seed: int) -> None:
        super().__init__()
        self.word = word_table(config, place)
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionTable(config, place) if learned else nn.Identity()
        self.norm = build_norm(config, place) if config.embed_layernorm else nn.Identity()
        self.dropout = Dropout(config.hidden_dropout, seed, "embedding.output")

    def forward(self, tokens: Tensor, sample_numbers: Tensor) -> Tensor:
        """``[b, s]`` token ids -> ``[s, b, h]``."""
        x = self.word(tokens.t().contiguous())
        return self.dropout(self.norm(self.position(x)), sample_numbers)
