"""Write muP's factor of the logits into the final norm, for programs without such a factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.source import ConversionSource
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config


@dataclass(frozen=True)
class FoldedMup:
    """Reads a source's model as the same model without muP.

    The logits of muP are those of the final norm's output, divided by the width ratio. So the norm's weight
    and bias are divided by it. A tied word embedding keeps its values. The scale of attention scores becomes
    --query-pre-attn-scalar.
    """

    source: ConversionSource

    @property
    def config(self) -> Config:
        config = self.source.config
        model = config.model
        has_own_scale = model.squared_score_divisor != model.head_dim
        folded = replace(
            model,
            mup_base_width=None,
            mup_base_head_dim=None,
            query_pre_attn_scalar=model.squared_score_divisor if has_own_scale else None,
        )
        return replace(config, model=folded)

    @property
    def progress(self) -> TrainingProgress:
        return self.source.progress

    @property
    def hugging_face(self) -> Mapping[str, Any] | None:
        return self.source.hugging_face

    def dtype_of(self, name: str) -> torch.dtype:
        return self.source.dtype_of(name)

    def tensor(self, name: str) -> Tensor:
        """Return one of the tensors, without the vocabulary's padding."""
        full, model = self.source.tensor(name), self.source.config.model
        if not name.startswith("final_norm."):
            return full
        if name == "final_norm.weight" and model.zero_centered_norms:
            return (full + 1.0) / model.width_ratio - 1.0
        return full / model.width_ratio
