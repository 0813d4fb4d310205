"""Our full tensors and those of transformers' GPT-2, BLOOM and Llama: the same numbers under other names.

Every step is a permutation of elements (but for the vocabulary's padding rows), so gradients and optimizer
state go the way of their weights. An entry stands by itself: a converter holds one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from megalite.config import ModelConfig
from megalite.convert.hf_families import FAMILIES, OUTPUT, Entry, Family
from megalite.errors import UserError


def family_of(config: ModelConfig) -> Family:
    """The architecture of transformers that the config describes.

    Raises:
        UserError: there is none; the message names the switches in the way.
    """
    family = FAMILIES.get(config.position_embedding_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"transformers has no such model: position_embedding_type {config.position_embedding_type} "
            f"is none of {known}"
        )
    if problems := family.problems(config):
        raise UserError(f"transformers' {family.model_type} cannot be this model: {', '.join(problems)}")
    return family


def layer_entries(config: ModelConfig, layer: int) -> list[Entry]:
    """The tensors of one layer."""
    return [entry for module in family_of(config).layer for entry in module.entries(config, layer)]


def end_entries(config: ModelConfig) -> list[Entry]:
    """The tensors outside the layers: embeddings, last norm, and an untied output weight."""
    untied = config.untie_embeddings_and_output_weights
    modules = [module for module in family_of(config).ends if untied or module is not OUTPUT]
    return [entry for module in modules for entry in module.entries(config)]


def all_entries(config: ModelConfig) -> Iterator[Entry]:
    """Every tensor of the model, once."""
    yield from end_entries(config)
    for layer in range(config.num_layers):
        yield from layer_entries(config, layer)


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Renames and reshapes full tensors of ours, all or some of them, to transformers'.

    Raises:
        UserError: a name is no parameter of the config's model, or transformers has no such model.
    """
    entries = {entry.ours: entry for entry in all_entries(config)}
    if unknown := sorted(set(tensors) - set(entries)):
        raise UserError(f"the model has no parameter {', '.join(unknown)}: is the config another model's?")
    converted: dict[str, Tensor] = {}
    for name, full in tensors.items():
        converted.update(entries[name].to_hf(full, config))
    return converted


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Renames and reshapes transformers' tensors, of the whole model, to ours.

    Their names may lack the prefix (``h.0.ln_1.weight``), as in the hub's files of GPT-2 and BLOOM. What no
    entry names is left out: masks and rotary tables of old versions, the second name of a tied weight.

    Raises:
        UserError: a tensor is missing or misshapen, or transformers has no such model.
    """
    prefix = family_of(config).prefix
    whole = {
        name if name.startswith((prefix, "lm_head.")) else prefix + name: tensor
        for name, tensor in tensors.items()
    }
    return {entry.ours: entry.from_hf(whole, config) for entry in all_entries(config)}
