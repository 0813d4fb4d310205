"""From the last hidden states to the logits of the vocabulary.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.config.model.model_config import num_padding_rows, padded_vocab_size
from megalite.model.embedding import multiplier
from megalite.model.norm import build_norm
from megalite.tensor_parallel.linear import LinearContext, column_linear
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut


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
        self.context = LinearContext.of(replace(context, fp8_format=None))
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
