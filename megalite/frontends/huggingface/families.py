"""All families of transformers: choose the one of a model, and convert the model's tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from megalite.config import ModelConfig
from megalite.frontends.huggingface.bert import BERT
from megalite.frontends.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from megalite.frontends.huggingface.family import UNREADABLE, Entry, Family
from megalite.frontends.huggingface.gemma import GEMMA2, GEMMA3, GEMMA4
from megalite.frontends.huggingface.gpt import BLOOM, GPT2, GPT_NEOX, GPTJ
from megalite.frontends.huggingface.llama import (
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from megalite.frontends.huggingface.mixtral import GPT_OSS, MINIMAX_M2, MIXTRAL, OLMOE
from megalite.frontends.huggingface.nemotron_h import NEMOTRON_H
from megalite.frontends.huggingface.qwen import QWEN2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from megalite.utils.errors import UserError

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *(GPT2, BLOOM, LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3, GEMMA2, GEMMA3),
        *(GEMMA4, GPT_NEOX, GPTJ, BERT, MIXTRAL, QWEN3_MOE, OLMOE, DEEPSEEK_V3, DEEPSEEK_V2),
        *(QWEN3_NEXT, QWEN3_5, NEMOTRON_H, QWEN2_MOE, QWEN3_5_MOE, GLM4_MOE, MINIMAX_M2, GPT_OSS),
    )
} | {"kimi_k2": DEEPSEEK_V3}
"""All architectures by `model_type`; Kimi K2 is DeepSeek-V3 with other sizes, and is written as such."""


@functools.cache
def family_of(config: ModelConfig, model_type: str | None = None) -> Family:
    """Return the transformers architecture that the config describes; of several, the first.

    Args:
        model_type: the architecture to return instead, if it is one of them.

    Raises:
        UserError: transformers has none; the message names the fields that prevent the nearest one.
    """
    preferred = FAMILIES.get(model_type) if model_type is not None else None
    if preferred is not None and not preferred.problems(config):
        return preferred
    nearest: tuple[Family, dict[str, str]] | None = None
    for family in FAMILIES.values():
        problems = family.problems(config)
        if not problems:
            return family
        if nearest is None or _distance(problems) < _distance(nearest[1]):
            nearest = family, problems
    assert nearest is not None
    raise UserError(
        f"transformers' {nearest[0].model_type} cannot be this model: {', '.join(nearest[1].values())}"
    )


def _distance(problems: Mapping[str, str]) -> tuple[int, ...]:
    """Return how far a family is from a model: the kinds of model, layers and positions come first."""
    first = (UNREADABLE, "architecture", "hybrid_override_pattern", "position_embedding_type")
    return (*(name in problems for name in first), len(problems))


def mtp_entries(config: ModelConfig, number: int, model_type: str | None = None) -> Iterator[Entry]:
    """Yield the tensors of a module of multi-token prediction: a layer after the last one, and its norms.

    Module k of a model with L layers has the names of layer L + k in files, k from 0.
    """
    family, layer = family_of(config, model_type), config.num_layers + number
    for module in (*family.layer, *family.mtp):
        for entry in module.entries(config, layer):
            ours = entry.ours.replace(f"layers.{layer}.", f"mtp.{layer}.layer.", 1)
            yield replace(entry, ours=ours.replace(f"mtp.{layer}.", f"mtp.{number}.", 1))


def end_entries(config: ModelConfig, model_type: str | None = None) -> list[Entry]:
    """Return the tensors outside the layers: embeddings, last norm, and an untied output weight."""
    return [entry for module in family_of(config, model_type).ends for entry in module.entries(config)]


def all_entries(config: ModelConfig, model_type: str | None = None) -> Iterator[Entry]:
    """Yield every tensor of the model once; for `model_type`, see `family_of`."""
    yield from end_entries(config, model_type)
    for layer in range(config.num_layers):
        for module in family_of(config, model_type).layer:
            yield from module.entries(config, layer)
    for number in range(config.mtp_num_layers):
        yield from mtp_entries(config, number, model_type)


def copied_names(config: ModelConfig) -> Iterator[str]:
    """Yield the names of copies of shared weights, which files may have for multi-token prediction."""
    for number in range(config.num_layers, config.num_layers + config.mtp_num_layers):
        for name in ("embed_tokens", "shared_head.head"):
            yield f"model.layers.{number}.{name}.weight"


def to_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Rename and reshape our full tensors, all or some of them, to transformers'; see `family_of`.

    Raises:
        UserError: a name is not a parameter of the config's model, or transformers has no such model.
    """
    entries = {entry.ours: entry for entry in all_entries(config, model_type)}
    if unknown := sorted(set(tensors) - set(entries)):
        raise UserError(
            f"the model has no parameter {', '.join(unknown)}: does the config belong to another model?"
        )
    converted: dict[str, Tensor] = {}
    for name, full in tensors.items():
        converted.update(entries[name].to_hf(full, config))
    return converted


def from_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Rename and reshape transformers' tensors of the whole model to ours; see `family_of`.

    Their names may lack the prefix (``h.0.ln_1.weight``), as in the hub's files of GPT-2 and BLOOM. Unknown
    tensors are ignored, such as masks and rotary tables of old versions, or the second name of a tied weight.

    Raises:
        UserError: a tensor is missing or has another shape, or transformers has no such model.
    """
    family = family_of(config, model_type)
    whole = {family.full_name(name): tensor for name, tensor in tensors.items()}
    return {entry.ours: entry.from_hf(whole, config) for entry in all_entries(config, model_type)}
