"""The part of a transformer that one pipeline stage holds.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megalite.attention.choice import build_core
from megalite.attention.core import StageCore
from megalite.config import ModelConfig
from megalite.config.model.transformer import NORMALIZED
from megalite.data.microbatch import LM_LOSS, LayerState, LossTerm, Microbatch
from megalite.model.embedding import Embedding, EmbeddingForLayers, OutputLayer, word_table
from megalite.model.experts import names_of_terms
from megalite.model.layer import TransformerLayer
from megalite.model.multi_token_prediction import MultiTokenPrediction, mtp_loss_names, mtp_router_terms
from megalite.model.norm import build_norm
from megalite.model.recurrent_mixer import RecurrentMixer
from megalite.model.stage import Stage
from megalite.tensor_parallel.parameter_spec import LayerContext


class TransformerStage(Stage):
    """Predicts each token with a transformer: GPT (Radford et al. 2019), BLOOM and Llama.

    The first and last stage hold a word embedding that both use under the same name, with the same values.
    The last stage uses it for the logits of a tied model, and in modules of multi-token prediction.
    """

    layer_arguments = ("sample_numbers", "positions")
    head_name = "final_norm"

    def build_shared(
        self,
        word: nn.Module | None = None,
        attention: Callable[[ModelConfig, LayerContext], StageCore] = build_core,
    ) -> None:
        """Build the attention core that all layers share, and a word embedding of the last stage.

        Args:
            word: word embedding of a first stage on the same rank.
            attention: builds the core.
        """
        self.core = attention(self.config, self.context)
        of_modules = (*mtp_loss_names(self.config), *mtp_router_terms(self.config))
        self.loss_names = (*self.loss_names, *of_modules, *names_of_terms(self.config))
        self.is_tied = not self.config.untie_embeddings_and_output_weights
        self.shares_embedding = self.is_tied or self.config.mtp_num_layers > 0
        if self.is_last and not self.is_first and self.shares_embedding:
            self.embedding = nn.ModuleDict({"word": word or word_table(self.config, self.context)})

    def build_embedding(self) -> nn.Module:
        """Return the embedding, which with --hidden-size-per-layer-input also has one for each layer."""
        has_more = self.config.hidden_size_per_layer_input is not None
        return (EmbeddingForLayers if has_more else Embedding)(self.config, self.context)

    def build_layer(self, number: int) -> nn.Module:
        """Return layer `number` of the model; its forward takes what `TransformerLayer.forward` takes."""
        return TransformerLayer(self.config, self.context, self.core, number)

    def own_inputs(self, layer: nn.Module, state: LayerState) -> tuple[Tensor, ...]:
        """Return a layer's own embedding, and the keys and values of an earlier layer that it attends to."""
        return layer.own_inputs(state) if isinstance(layer, TransformerLayer) else ()

    def build_head(self) -> nn.Module:
        """Return the final norm, unless the last layer's sum is normalized."""
        is_normalized = "sum" in NORMALIZED[self.config.norm_position]
        return nn.Identity() if is_normalized else build_norm(self.config, self.context)

    def build_last_part(self) -> None:
        """Build the final norm, the modules of multi-token prediction and the output layer."""
        super().build_last_part()
        if self.config.mtp_num_layers:
            self.mtp = MultiTokenPrediction(self.config, self.context, self.core)
        has_bias = self.config.add_output_bias and self.config.architecture == "gpt"
        self.output = OutputLayer(self.config, self.context, is_tied=self.is_tied, has_bias=has_bias)

    def last_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters of the final norm, of multi-token prediction and of the logits."""
        found = [*super().last_parameters()]
        if self.config.mtp_num_layers:
            found += [*self.mtp.parameters(), self.get_parameter("embedding.word.weight")]
        bias = () if self.output.bias is None else (self.output.bias,)
        return dict.fromkeys([*found, self.output_weight, *bias])

    def losses(self, output: Tensor, microbatch: Microbatch) -> Tensor | Mapping[str, Tensor | LossTerm]:
        """Return the losses of the next tokens and, with --mtp-num-layers, of the tokens after them."""
        if microbatch.later_tokens is None:
            assert not (self.training and self.config.mtp_num_layers), "training reads later tokens"
            return super().losses(output, microbatch)
        word, inputs = self.get_submodule("embedding.word"), self.layer_inputs(microbatch)
        states, terms = self.mtp(word, output, microbatch, inputs)
        of_tokens = self.losses_of(states, self.mtp.targets(microbatch))  # [s, (1 + d) b], or [..., 2]
        num_samples = output.shape[1]
        sums = self.sums_of(of_tokens[:, :num_samples], microbatch)
        later = of_tokens[:, num_samples:]
        later = later[..., 0] if later.dim() > 2 else later  # no z-loss
        return {
            **({LM_LOSS: sums} if isinstance(sums, Tensor) else sums),
            **self.mtp.terms(later, microbatch),
            **terms,
        }

    def layer_inputs(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """Return the keys of the layers' dropouts, and the tokens' positions."""
        positions = self.core.position_info(microbatch)
        if microbatch.is_real is not None and self.config.has_experts:
            positions = positions._replace(is_real=microbatch.is_real.t())
        return microbatch.samples, positions

    def all_layers(self) -> Iterator[nn.Module]:
        """Yield the layers, also those of multi-token prediction."""
        yield from super().all_layers()
        if self.is_last and self.config.mtp_num_layers:
            yield from (module.get_submodule("layer") for module in self.mtp)

    def prepare_tables(self, seq_length: int) -> None:
        """Build the attention core's tables for sequences of this length."""
        self.core.prepare(seq_length)

    def tables(self) -> Iterable[Tensor]:
        """Return the attention core's tensors; call it once the core has built them."""
        return self.core.tables()

    @property
    def description(self) -> str:
        """Return the kernels of attention and of recurrences, and the reason for their choice."""
        problems = {each.kernel_problem for each in self.modules() if isinstance(each, RecurrentMixer)}
        recurrences = (f"plain PyTorch ({each})" if each else "Triton" for each in sorted(problems))
        return "; ".join(
            [f"attention: {self.core.choice}", *(f"recurrences: {each}" for each in recurrences)]
        )

    def shared_modules(self) -> dict[str, nn.Module]:
        """Return the word embedding."""
        return {"word": self.get_submodule("embedding.word")}

    def logits_of(self, output: Tensor) -> Tensor:
        """Map ``[s, b, h]`` after the final norm to this rank's logits, ``[s, b, v/tp]``."""
        return self.output.logits(output, self.output_weight)

    @property
    def output_layer(self) -> OutputLayer:
        """Return the layer of `logits_of`."""
        return self.output

    @property
    def output_weight(self) -> nn.Parameter:
        """Return the weight of the logits on the last stage: the word embedding or a separate weight."""
        return self.get_parameter("embedding.word.weight" if self.is_tied else "output.weight")

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return this rank's slice of a word embedding that the first and last stage use; None elsewhere."""
        at_edge = self.is_first or self.is_last
        return self.get_parameter("embedding.word.weight") if self.shares_embedding and at_edge else None

    @property
    def num_tied_gradients(self) -> int:
        """Return how many gradients of `tied_weight` a backward computes, at once or later."""
        if self.tied_weight is None:
            return 0
        is_output = self.is_last and self.is_tied
        # The output layer stores its gradient for later; the lookup of later tokens does not.
        is_apart = is_output and self.config.mtp_num_layers > 0 and self.output.context.store is not None
        return 2 if is_apart else 1


GPT = TransformerStage
"""Public name of `TransformerStage`."""
