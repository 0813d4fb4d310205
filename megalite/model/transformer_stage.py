"""The part of a transformer that one pipeline stage holds, without the loss.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.errors import check_call
from megalite.microbatch import Microbatch
from megalite.model.attention_backends import build_core
from megalite.model.attention_core import Core
from megalite.model.embedding import Embedding, word_table
from megalite.model.layer import LAYERS
from megalite.model.norm import build_norm
from megalite.model.stage import Stage
from megalite.tensor_parallel.linear import LinearContext, column_linear
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, Shard, new_parameter
from megalite.tensor_parallel.vocab_cross_entropy import vocab_parallel_cross_entropy


class OutputWeight(nn.Module):
    """Holds the output layer's weight, in a model that does not share it with the embedding."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        spec = ParameterSpec(
            (config.padded_vocab_size(context.tp.size), config.hidden_size),
            Shard("tp", 0),
            std=config.init_method_std,
            num_padding=config.num_padding_rows(context.tp.size),
            is_vocabulary=True,
        )
        self.weight = new_parameter(spec, context)  # [v/tp, h]


class TransformerStage(Stage):
    """Holds some layers of a transformer; the first stage also has the embedding, the last one the loss.

    The first and last stage hold a tied word embedding under the same name, with the same values.

    Args:
        layers: numbers of the stage's layers in the whole model.
        is_first: whether the stage has the embedding.
        is_last: whether the stage has the final norm, the head and the losses.
        word: word embedding of a first stage on the same rank, for the last stage of a tied model.
        attention: builds the attention core that all layers share.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        layers: Iterable[int],
        *,
        is_first: bool = True,
        is_last: bool = True,
        word: nn.Module | None = None,
        attention: Callable[[ModelConfig, LayerContext], Core] = build_core,
    ) -> None:
        super().__init__(config, context, is_first=is_first, is_last=is_last)
        self.core = attention(config, context)
        is_tied = not config.untie_embeddings_and_output_weights
        if is_first:
            self.embedding: nn.Module = Embedding(config, context)
        elif is_last and is_tied:
            self.embedding = nn.ModuleDict({"word": word or word_table(config, context)})
        name = type(self).__name__
        check_call(self.build_layer, f"{name}.build_layer", "number")
        check_call(self.losses, f"{name}.losses", "normed", "microbatch")
        built = {str(i): self.build(f"layers.{i}", partial(self.build_layer, i)) for i in layers}
        self.layers = nn.ModuleDict(built)
        if is_last:
            is_pre_norm = config.norm_position == "pre"
            self.final_norm = build_norm(config, context) if is_pre_norm else nn.Identity()
            self.output = None if is_tied else OutputWeight(config, context)
            self.output_context = LinearContext.of(replace(context, fp8_format=None))
            self.build_head()
        self.initialize()

    def build_layer(self, number: int) -> nn.Module:
        """Return layer `number` of the model; its forward takes what `TransformerLayer.forward` takes."""
        return LAYERS[self.config.norm_position](self.config, self.context, self.core, number)

    def forward(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Run one microbatch through this stage.

        Args:
            hidden: ``[s, b, h]`` from the previous stage; None on the first stage.

        Returns:
            ``[s, b, h]`` for the next stage; on the last stage the result of `losses`.
        """
        x = self.hidden_states(microbatch, hidden)
        return self.losses(self.final_norm(x), microbatch) if self.is_last else x

    @abstractmethod
    def losses(self, normed: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the sum of each loss over a microbatch, a scalar or a vector of several losses.

        Args:
            normed: ``[s, b, h]`` after the final norm.
        """

    def build_head(self) -> None:
        """Build the last stage's modules between the final norm and the losses, besides the output weight."""

    def head_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters of `build_head`."""
        return ()

    def hidden_states(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Return the output of this stage's last layer, ``[s, b, h]``."""
        if hidden is None:
            hidden = self.embedding(microbatch)
        positions = self.core.position_info(microbatch)
        return self.run_layers([*self.layers.values()], hidden, microbatch.sample_numbers, positions)

    def tables(self) -> Iterable[Tensor]:
        """Return the attention core's tensors; call it once the core has built them."""
        return self.core.tables()

    @property
    def description(self) -> str:
        """Return the attention kernel and the reason for its choice."""
        return f"attention: {self.core.choice}"

    def shared_modules(self) -> dict[str, nn.Module]:
        """Return the word embedding."""
        return {"word": self.get_submodule("embedding.word")}

    def losses_of(self, normed: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, ``[s, b]``.

        Args:
            normed: ``[s, b, h]`` after the final norm.
            targets: ``[s, b]``, ids of the tokens to predict; the full sequence, even if sequence parallel.
        """
        logits = self.logits_of(normed)
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.context.tp)

    def logits_of(self, normed: Tensor) -> Tensor:
        """Map ``[s, b, h]`` after the final norm to this rank's logits, ``[s, b, v/tp]``.

        Columns from `vocab_size` on are padding.
        """
        return column_linear(normed, self.output_weight, None, self.output_context)

    @property
    def output_weight(self) -> nn.Parameter:
        """Return the weight of the logits on the last stage: the word embedding or a separate weight."""
        return self.get_parameter("embedding.word.weight" if self.output is None else "output.weight")

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return this rank's slice of a tied word embedding on the first and last stage; None elsewhere."""
        at_edge = self.is_first or self.is_last
        if self.config.untie_embeddings_and_output_weights or not at_edge:
            return None
        return self.get_parameter("embedding.word.weight")

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens in the vocabulary, without padding."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    def units(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield the modules in forward's order, each with the parameters used until the next one's call."""
        if self.is_first:
            yield self.embedding, list(self.embedding.parameters())
        for layer in self.layers.values():
            yield layer, list(layer.parameters())
        if self.is_last:
            parameters = *self.final_norm.parameters(), *self.head_parameters(), self.output_weight
            yield self.final_norm, list(parameters)
