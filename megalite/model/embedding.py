"""From token ids to the first hidden states."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.norm import build_norm
from megalite.parallel.rng import Dropout
from megalite.parallel.shard import ParameterSpec, Placement, new_parameter
from megalite.parallel.vocab_embedding import VocabParallelEmbedding


class PositionTable(nn.Module):
    """A learned vector for each position, whole on every rank."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.place = place
        spec = ParameterSpec((config.num_positions, config.hidden_size), std=config.init_method_std)
        self.weight = new_parameter(spec, place)  # [positions, h]

    def forward(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """``[s, b, h]``, or a rank's part of them -> the same; positions ``[b, s]``, None for the places."""
        first = self.place.first_position(x.shape[0])
        places = slice(first, first + x.shape[0])
        if position_ids is None:
            return x + self.weight[places, None]
        return x + F.embedding(position_ids.t()[places], self.weight)


class NoPositionTable(nn.Module):
    """What stands in the place of `PositionTable` where positions enter in attention."""

    def forward(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """Gives `x` as it is."""
        return x


def word_table(config: ModelConfig, place: Placement) -> VocabParallelEmbedding:
    """The table of word vectors over the padded vocabulary."""
    rows, padding = config.padded_vocab_size(place.tp.size), config.num_padding_rows(place.tp.size)
    return VocabParallelEmbedding(
        rows, config.hidden_size, place, std=config.init_method_std, num_padding=padding
    )


class Embedding(nn.Module):
    """Word vectors, with learned positions and BLOOM's embedding norm where the config has them."""

    def __init__(self, config: ModelConfig, place: Placement, seed: int) -> None:
        super().__init__()
        self.place = place
        self.word = word_table(config, place)
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionTable(config, place) if learned else NoPositionTable()
        self.norm = build_norm(config, place) if config.embed_layernorm else nn.Identity()
        self.dropout = Dropout(config.hidden_dropout, seed, "embedding.output")

    def forward(self, tokens: Tensor, sample_numbers: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """``[b, s]`` token ids, and positions where they are not the places -> ``[s, b, h]``.

        The hidden states are this rank's, ``[s/t, b, h]``, if sequence parallel.
        """
        x = self.word(tokens.t().contiguous())
        base = self.place.first_position(x.shape[0]) * x.shape[-1]
        return self.dropout(self.norm(self.position(x, position_ids)), sample_numbers, base)
