"""A base class for models of your own.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.errors import UserError, check_call, kind_of
from megalite.microbatch import Microbatch
from megalite.model.embedding import Embedding
from megalite.model.norm import build_norm
from megalite.model.stage import Stage
from megalite.model.transformer_stage import OutputWeight
from megalite.tensor_parallel.linear import LinearContext, column_linear
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.vocab_cross_entropy import vocab_parallel_cross_entropy


class VocabHead(nn.Module):
    """Computes the logits of the vocabulary from norm(x)."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.norm = build_norm(config, context)
        self.output = OutputWeight(config, context)
        self.context = LinearContext.of(replace(context, fp8_format=None))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, v/tp]``."""
        return column_linear(self.norm(x), self.output.weight, None, self.context)


class SequentialStage(Stage):
    """Runs an embedding, layers one after the other, and a head. Subclass it for a model of your own.

    A subclass must build its layers. By default the embedding is GPT's, and the head predicts the next token
    with its own weight.

    The modules may be megalite's tensor-parallel layers, or torch's own modules, which are replicated over
    tp. Use megalite's `Dropout`: torch's dropout depends on the layout. Checkpoints do not hold buffers.

    Args:
        layers: numbers of the stage's layers in the whole model.

    Raises:
        UserError: a subclass builds an object that is not a module, or that does not take its arguments.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        layers: Iterable[int],
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__(config, context, is_first=is_first, is_last=is_last)
        name = type(self).__name__
        check_call(self.build_layer, f"{name}.build_layer", "number")
        if is_first:
            self.embedding = self.build("embedding", self.build_embedding)
            check_call(self.embedding.forward, f"{type(self.embedding).__name__}.forward", "microbatch")
        built = {str(i): self.build(f"layers.{i}", partial(self.build_layer, i)) for i in layers}
        self.layers = nn.ModuleDict(built)
        for layer in built.values():
            check_call(layer.forward, f"{type(layer).__name__}.forward", "x", "microbatch")
        if is_last:
            self.head = self.build("head", self.build_head)
            check_call(self.head.forward, f"{type(self.head).__name__}.forward", "x")
            check_call(self.losses, f"{name}.losses", "output", "microbatch")
        self.initialize()

    def build_embedding(self) -> nn.Module:
        """Return a module that maps a `Microbatch` to ``[s, b, h]``."""
        return Embedding(self.config, self.context)

    @abstractmethod
    def build_layer(self, number: int) -> nn.Module:
        """Return a layer by its number; it maps ``[s, b, h]`` and a `Microbatch` to ``[s, b, h]``."""

    def build_head(self) -> nn.Module:
        """Return a module that maps ``[s, b, h]`` to the input of `losses`."""
        return VocabHead(self.config, self.context)

    def losses(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the sum of the losses of a microbatch's tokens, a scalar.

        Args:
            output: output of the head: by default logits, ``[s, b, v/tp]``.
        """
        vocab_size, targets = self.config.vocab_size, microbatch.labels.t()
        assert vocab_size is not None
        losses = vocab_parallel_cross_entropy(output, targets, vocab_size, self.context.tp)
        return self.masked_sum(losses, microbatch)

    def forward(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Run one microbatch through this stage; see `Stage.forward`."""
        x = self.embedding(microbatch) if hidden is None else hidden
        x = self.run_layers([*self.layers.values()], x, microbatch)
        return self.losses(self.head(x), microbatch) if self.is_last else x

    def run_group(self, group: range, layers: Sequence[nn.Module], x: Tensor, *inputs: Any) -> Tensor:
        """Run the layers of one group; see `Stage.run_group`.

        Raises:
            UserError: a layer does not return a tensor with the shape of x.
        """
        for i in group:
            y = layers[i](x, *inputs)
            if not isinstance(y, Tensor) or y.shape != x.shape:
                returned = f"shape {list(y.shape)}" if isinstance(y, Tensor) else kind_of(y)
                error = UserError(
                    f"{type(layers[i]).__name__}.forward returns {returned} for hidden states of shape "
                    f"{list(x.shape)}: return a tensor of the same shape, [s, b, h]"
                )
                error.on_one_rank = not self.is_first  # rank 0, which reports for all, has the first stage
                raise error
            x = y
        return x

    def units(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield the modules in forward's order, each with the parameters used until the next one's call."""
        edges = ([self.embedding] if self.is_first else []), ([self.head] if self.is_last else [])
        for module in (*edges[0], *self.layers.values(), *edges[1]):
            yield module, list(module.parameters())
