"""Model classes by the config's `architecture`."""

from __future__ import annotations

from collections.abc import Mapping

from megalite.model.bert_stage import BertStage
from megalite.model.transformer_stage import TransformerStage

STAGES: Mapping[str, type[TransformerStage]] = {"gpt": TransformerStage, "bert": BertStage}
"""Class of a pipeline stage."""
