"""The part of a BERT model that one pipeline stage holds.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``; with context parallelism s is that of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.config.model.model_config import num_padding_rows, padded_vocab_size
from megalite.data.microbatch import LM_LOSS, LossTerm, Microbatch
from megalite.distributed.collectives import all_gather_from, reduce_from_tensor_parallel
from megalite.model.mlp import ACTIVATION_FUNCTIONS
from megalite.model.norm import build_norm
from megalite.model.transformer_stage import TransformerStage
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.utils.wrapping import wrap_point

SOP_LOSS = "sop_loss"
"""Name of the loss of the order of segments."""


class ReplicatedLinear(nn.Module):
    """Computes y = x A^T + b with A and b replicated on every rank: heads are too small to be cut."""

    def __init__(
        self, in_features: int, out_features: int, context: LayerContext, *, bias: bool, std: float
    ) -> None:
        super().__init__()
        weight = ParameterSpec((out_features, in_features), std=std, maps_features=False)
        self.weight = new_parameter(weight, context)
        spec = ParameterSpec((out_features,), decay=False)
        self.bias = new_parameter(spec, context) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.weight, self.bias)


class MaskedTokenHead(nn.Module):
    """Computes norm(activation(dense(x))), and holds the bias of the logits (Devlin et al. 2019)."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        h, tp = config.hidden_size, context.tp.size
        self.activation = ACTIVATION_FUNCTIONS["gelu" if config.is_gated else config.activation]
        self.dense = ReplicatedLinear(h, h, context, bias=config.add_bias_linear, std=config.init_method_std)
        self.norm = build_norm(config, context)
        spec = ParameterSpec(
            (padded_vocab_size(config, tp),),
            Cut("tp", 0),
            decay=False,
            num_padding=num_padding_rows(config, tp),
        )
        self.output_bias = new_parameter(spec, context)  # [v/tp]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``."""
        function, adds_bias, _ = self.activation
        if adds_bias:
            y = function(F.linear(x, self.dense.weight), self.dense.bias)
        else:
            y = function(self.dense(x))
        normed: Tensor = self.norm(y)
        return normed


class OrderHead(nn.Module):
    """Predicts from a sample's first token whether its two segments are swapped (Lan et al. 2020).

    The published BERT predicts whether the second segment follows the first in the same way.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        h, bias, std = config.hidden_size, config.add_bias_linear, config.init_method_std
        self.pooler = ReplicatedLinear(h, h, context, bias=bias, std=std)
        self.classifier = ReplicatedLinear(h, 2, context, bias=bias, std=std)

    def forward(self, first: Tensor) -> Tensor:
        """Map the first tokens' hidden states ``[b, h]`` to scores ``[b, 2]``."""
        scores: Tensor = self.classifier(torch.tanh(self.pooler(first)))
        return scores


class BertStage(TransformerStage):
    """Predicts masked tokens from both sides, and whether a sample's segments are in order."""

    def __init__(
        self, config: ModelConfig, context: LayerContext, layers: Iterable[int], **more: Any
    ) -> None:
        super().__init__(config, context, layers, **more)
        if config.bert_binary_head:
            self.loss_names = (*self.loss_names, SOP_LOSS)

    def build_last_part(self) -> None:
        """Build the final norm, the output layer and the heads of both predictions."""
        super().build_last_part()
        self.token_head = MaskedTokenHead(self.config, self.context)
        self.order_head = OrderHead(self.config, self.context) if self.config.bert_binary_head else None

    def last_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters of the final norm, both heads and the logits."""
        heads = (head for head in (self.token_head, self.order_head) if head is not None)
        return *super().last_parameters(), *(each for head in heads for each in head.parameters())

    def losses(self, output: Tensor, microbatch: Microbatch) -> dict[str, LossTerm]:
        """Return the masked tokens' loss and, with the binary head, the samples' loss of segment order."""
        selected, predicted = self._select(output, microbatch)
        of_tokens = self.losses_of(selected, predicted.labels.t())
        if self.config.z_loss_coeff == 0.0:
            losses = {LM_LOSS: LossTerm(self.masked_sum(of_tokens, predicted))}
        else:
            losses = self.with_z_loss(of_tokens, predicted)
        if self.order_head is not None:
            losses[SOP_LOSS] = LossTerm(self._order_loss(output, microbatch), per="sample")
        return losses

    def _select(self, normed: Tensor, microbatch: Microbatch) -> tuple[Tensor, Microbatch]:
        """Select the tokens to predict: most tokens need no logits.

        Returns:
            ``[k, b, h]``, or ``[k/tp, b, h]`` if sequence parallel, and the microbatch, with a k that tp
            divides.
        """
        if microbatch.label_positions is None:
            return normed, microbatch
        assert microbatch.loss_mask is not None
        tp = self.context.tp
        padding = (0, -microbatch.labels.shape[1] % tp.size)
        positions = F.pad(microbatch.label_positions, padding)  # [b, k]
        labels, loss_mask = (F.pad(x, padding) for x in (microbatch.labels, microbatch.loss_mask))
        predicted = replace(microbatch, labels=labels, loss_mask=loss_mask)
        x = normed.permute(1, 2, 0)  # [b, h, s]
        if self.context.sequence_parallel:
            # The selected tokens form a shorter sequence, which is cut over tp again.
            x, positions = all_gather_from(x, tp), positions.chunk(tp.size, dim=1)[tp.rank]
        x = x.gather(2, positions[:, None].expand(-1, x.shape[1], -1))
        return x.permute(2, 0, 1).contiguous(), predicted

    @wrap_point
    def losses_of(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of each token; see `Stage`."""
        losses = self.losses_of_logits(self._flat_logits(output), targets.flatten())
        return losses.unflatten(0, targets.shape)

    def logits_of(self, output: Tensor) -> Tensor:
        """Map ``[s, b, h]`` after the final norm to this rank's logits, ``[s, b, v/tp]``."""
        return self._flat_logits(output).unflatten(0, (-1, output.shape[1]))

    def _flat_logits(self, normed: Tensor) -> Tensor:
        """Return the logits ``[s b, v/tp]``: a GEMM with a bias returns a view of them for more dims.

        The cross-entropy overwrites the logits with their gradient, which autograd does not allow for a view.
        """
        head = self.token_head
        x = head(normed).flatten(0, 1)
        return self.output.logits(x, self.output_weight, head.output_bias)

    def order_scores(self, normed: Tensor) -> Tensor:
        """Map ``[s, b, h]`` after the final norm to the scores of the segment order, ``[b, 2]``."""
        assert self.order_head is not None
        scores: Tensor = self.order_head(normed[0])
        return scores

    def _order_loss(self, normed: Tensor, microbatch: Microbatch) -> Tensor:
        assert microbatch.order_labels is not None
        scores = self.order_scores(normed)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        loss = F.cross_entropy(wide, microbatch.order_labels, reduction="sum")
        if self.context.topology.positions.index > 0:
            loss = loss * 0.0  # the first token is on another rank, whose loss is added
        if not self.context.sequence_parallel:
            return loss
        # The first token is on rank 0. The other ranks' parameters get gradients of zero, and the optimizer
        # sums the gradients of all ranks.
        tp = self.context.tp
        return reduce_from_tensor_parallel(loss if tp.rank == 0 else loss * 0.0, tp)


STAGES: Mapping[str, type[TransformerStage]] = {"gpt": TransformerStage, "bert": BertStage}
"""Class of a pipeline stage, by the config's `architecture`."""

BERT = BertStage
"""Public name of `BertStage`."""
