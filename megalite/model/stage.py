"""The part of the model that one pipeline rank holds.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, t = tp.size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig, RecomputeConfig
from megalite.model.attention_core import Core
from megalite.model.backends import build_core
from megalite.model.documents import Documents
from megalite.model.embedding import Embedding, word_table
from megalite.model.layer import TransformerLayer
from megalite.model.norm import build_norm
from megalite.parallel.linear import LinearContext, column_linear
from megalite.parallel.loss import losses_in_chunks, vocab_parallel_cross_entropy
from megalite.parallel.recompute import RecomputedLayers
from megalite.parallel.rng import initialize
from megalite.parallel.shard import ParameterSpec, Placement, Shard, new_parameter
from megalite.parallel.weight_gradient_store import WeightGradientStore
from megalite.topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class OutputWeight(nn.Module):
    """The output layer's own weight, for a model that does not share it with the embedding."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        shape = (config.padded_vocab_size(place.tp.size), config.hidden_size)
        spec = ParameterSpec(
            shape,
            Shard("tp", 0),
            std=config.init_method_std,
            num_padding=config.num_padding_rows(place.tp.size),
        )
        self.weight = new_parameter(spec, place)


class GPTStage(nn.Module):
    """Some of the model's layers, on the first stage with the embedding and on the last with the loss.

    Parameters' names are those of the whole model, whatever the stage: ``layers.7.mlp.up.weight``. A tied
    word table stands on the first and the last stage under one name, and both hold the same numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layers: Iterable[int],
        seed: int,
        *,
        is_first: bool | None = None,
        is_last: bool | None = None,
        word: nn.Module | None = None,
        weight_gradient_store: WeightGradientStore | None = None,
        fuses_weight_gradients: bool = False,
        sequence_parallel: bool = False,
        recompute: RecomputeConfig | None = None,
        has_weights: bool = True,
        attention: Callable[[ModelConfig, Placement], Core] = build_core,
        fp8_format: str | None = None,
    ) -> None:
        """Builds the stage with its initial weights.

        Args:
            layers: numbers of the model's layers that it holds.
            seed: keys the initial weights and the dropout.
            is_first: whether it is the model's first stage; by default, whether its rank is the first.
            is_last: the same of the last one.
            word: for a tied model's last stage, the word table of a first stage on the same rank.
            weight_gradient_store: takes weight gradients if the schedule computes them later.
            fuses_weight_gradients: linear layers add theirs to `weight.main_grad`.
            sequence_parallel: hidden states, from this stage to the next too, are ``[s/t, b, h]``.
            recompute: what backward computes again; by default nothing.
            has_weights: else parameters have no memory and no initial weights.
            attention: makes the attention product that all layers share.
            fp8_format: of the layers' products; the embedding and the logits have none.
        """
        super().__init__()
        place = Placement(
            topology.tp,
            DTYPES[config.params_dtype],
            topology.device,
            sequence_parallel,
            weight_gradient_store,
            fuses_weight_gradients,
            has_weights,
            fp8_format,
        )
        self.config = config
        self.tp = topology.tp
        self.is_first = topology.pp.is_first if is_first is None else is_first
        self.is_last = topology.pp.is_last if is_last is None else is_last
        self.core = attention(config, place)
        self._make_start(place, seed, word)
        recompute = recompute or RecomputeConfig()
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(config, place, self.core, i, seed, recompute.modules) for i in layers}
        )
        self.run_layers = RecomputedLayers(recompute, place, len(self.layers))
        if self.is_last:
            self._make_end(place, recompute.cross_entropy_chunks)
        if has_weights and topology.device.type != "meta":
            initialize(self, seed, topology)

    def _make_start(self, place: Placement, seed: int, word: nn.Module | None) -> None:
        """Makes what comes before the layers, and the word table that a tied model's last stage shares."""
        if self.is_first:
            self.embedding: nn.Module = Embedding(self.config, place, seed)
        elif self.is_last and not self.config.untie_embeddings_and_output_weights:
            self.embedding = nn.ModuleDict({"word": word or word_table(self.config, place)})

    def _make_end(self, place: Placement, num_chunks: int) -> None:
        """Makes what comes after the layers: the norm, the logits' product, and how the losses come of it.

        In chunks the weight has one gradient of them all, summed by autograd in the weight's precision: the
        schedule cannot put it off.
        """
        self.final_norm = build_norm(self.config, place)
        untied = self.config.untie_embeddings_and_output_weights
        self.output: nn.Module | None = OutputWeight(self.config, place) if untied else None
        self.in_chunks: Callable[[Tensor, Tensor], Tensor] | None = None
        if num_chunks > 1:
            place = replace(place, weight_gradient_store=None, fuses_weight_gradients=False)
            num_slices = place.tp.size if place.sequence_parallel else 1
            self.in_chunks = partial(
                losses_in_chunks, self._losses, num_chunks=num_chunks, num_slices=num_slices
            )
        self.output_context = LinearContext.of(replace(place, fp8_format=None))

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This rank's slice of a word table that the first and last stage share; None elsewhere."""
        at_edge = self.is_first or self.is_last
        if self.config.untie_embeddings_and_output_weights or not at_edge:
            return None
        return self.get_parameter("embedding.word.weight")

    def units(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Modules in the order of forward's calls, with what is used from one's call to the next's."""
        if self.is_first:
            yield self.embedding, list(self.embedding.parameters())
        for layer in self.layers.values():
            yield layer, list(layer.parameters())
        if self.is_last:
            yield self.final_norm, [*self.final_norm.parameters(), self.output_weight]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample_numbers: Tensor,
        hidden: Tensor | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Runs one microbatch through this stage.

        Args:
            tokens: ``[b, s]`` ids, read on the first stage.
            labels: ``[b, s]`` ids of the next tokens, read on the last stage.
            sample_numbers: int64 ``[b]``, global numbers of the samples: they key the dropout.
            hidden: ``[s, b, h]`` from the stage before; None on the first.
            documents: of packed samples; None for samples that are taken whole.

        Returns:
            ``[s, b, h]`` for the next stage, or on the last one the sum of the tokens' losses, a scalar, over
            those that count.
        """
        x = self.hidden_states(tokens, sample_numbers, hidden, documents)
        if not self.is_last:
            return x
        losses = self.token_losses(x, labels.t())
        if documents is not None and documents.loss_mask is not None:
            losses = losses.where(documents.loss_mask.t(), 0.0)
        return losses.sum()

    def hidden_states(
        self,
        tokens: Tensor,
        sample_numbers: Tensor,
        hidden: Tensor | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """What leaves this stage's last layer, ``[s, b, h]``."""
        position_ids = None if documents is None else documents.position_ids
        x = self.embedding(tokens, sample_numbers, position_ids) if hidden is None else hidden
        places = self.core.places(documents)
        layers = [
            partial(layer, sample_numbers=sample_numbers, places=places) for layer in self.layers.values()
        ]
        return self.run_layers(layers, x)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """``[s, b, h]`` after the last layer, and the ids ``[s, b]`` of the next tokens -> ``[s, b]``."""
        hidden = self.final_norm(hidden)
        return self._losses(hidden, targets) if self.in_chunks is None else self.in_chunks(hidden, targets)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = column_linear(hidden, self.output_weight, None, self.output_context)
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.tp)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[s, b, h]`` after the last layer -> this rank's columns of the logits, ``[s, b, v/t]``.

        Columns from `vocab_size` on are padding and mean nothing.
        """
        return column_linear(self.final_norm(hidden), self.output_weight, None, self.output_context)

    @property
    def output_weight(self) -> nn.Parameter:
        """What the logits are made with on the last stage: the word table, or a weight of their own."""
        return self.get_parameter("embedding.word.weight" if self.output is None else "output.weight")

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size
