"""The part of the model that one pipeline rank holds.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, t = tp.size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.attention import build_core
from megalite.model.embedding import Embedding, word_table
from megalite.model.layer import TransformerLayer
from megalite.model.norm import build_norm
from megalite.parallel.collectives import copy_to
from megalite.parallel.loss import vocab_parallel_cross_entropy
from megalite.parallel.rng import initialize
from megalite.parallel.shard import ParameterSpec, Placement, Shard, new_parameter
from megalite.topology import Topology

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class OutputWeight(nn.Module):
    """The output layer's own weight, for a model that does not share it with the embedding."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        shape = (config.padded_vocab_size(place.tp.size), config.hidden_size)
        self.weight = new_parameter(ParameterSpec(shape, Shard("tp", 0), std=config.init_method_std), place)


class GPTStage(nn.Module):
    """Some of the model's layers, on the first stage with the embedding and on the last with the loss.

    Parameters' names are those of the whole model, whatever the stage: ``layers.7.mlp.up.weight``. A tied
    word table stands on the first and the last stage under one name, and both hold the same numbers.
    """

    def __init__(self, config: ModelConfig, topology: Topology, layers: Iterable[int], seed: int) -> None:
        super().__init__()
        place = Placement(topology.tp, DTYPES[config.params_dtype], topology.device)
        self.config = config
        self.tp = topology.tp
        self.is_first, self.is_last = topology.pp.is_first, topology.pp.is_last
        core = build_core(config, place)
        tied = not config.untie_embeddings_and_output_weights
        if self.is_first:
            self.embedding: nn.Module = Embedding(config, place, seed)
        elif self.is_last and tied:
            self.embedding = nn.ModuleDict({"word": word_table(config, place)})
        self.layers = nn.ModuleDict({str(i): TransformerLayer(config, place, core, i, seed) for i in layers})
        if self.is_last:
            self.final_norm = build_norm(config, place)
            self.output: nn.Module | None = None if tied else OutputWeight(config, place)
        if topology.device.type != "meta":
            initialize(self, seed, topology)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This rank's slice of a word table that the first and last stage share; None elsewhere."""
        at_edge = self.is_first or self.is_last
        if self.config.untie_embeddings_and_output_weights or not at_edge:
            return None
        return self.get_parameter("embedding.word.weight")

    def forward(
        self, tokens: Tensor, labels: Tensor, sample_numbers: Tensor, hidden: Tensor | None
    ) -> Tensor:
        """Runs one microbatch through this stage.

        Args:
            tokens: ``[b, s]`` ids, read on the first stage.
            labels: ``[b, s]`` ids of the next tokens, read on the last stage.
            sample_numbers: int64 ``[b]``, global numbers of the samples: they key the dropout.
            hidden: ``[s, b, h]`` from the stage before; None on the first.

        Returns:
            ``[s, b, h]`` for the next stage, or on the last one the sum of the tokens' losses, a scalar.
        """
        x = self.hidden_states(tokens, sample_numbers, hidden)
        if not self.is_last:
            return x
        losses = vocab_parallel_cross_entropy(self.logits(x), labels.t(), self.vocab_size, self.tp)  # [s, b]
        return losses.sum()

    def hidden_states(self, tokens: Tensor, sample_numbers: Tensor, hidden: Tensor | None) -> Tensor:
        """What leaves this stage's last layer, ``[s, b, h]``."""
        x = self.embedding(tokens, sample_numbers) if hidden is None else hidden
        for layer in self.layers.values():
            x = layer(x, sample_numbers)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``[s, b, h]`` after the last layer -> this rank's columns of the logits, ``[s, b, v/t]``.

        Columns from `vocab_size` on are padding and mean nothing.
        """
        name = "embedding.word.weight" if self.output is None else "output.weight"
        return F.linear(copy_to(self.final_norm(hidden), self.tp), self.get_parameter(name))

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size
