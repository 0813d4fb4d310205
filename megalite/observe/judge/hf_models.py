"""Models of transformers with megalite's weights, for adapters whose package trains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megalite.config import Config
from megalite.frontends.huggingface.families import family_of, hf_config_of, to_hf
from megalite.utils.errors import UserError


def hf_config(config: Config) -> Any:
    """Return transformers' config of the model, without dropout. Its experts run one after the other.

    Raises:
        UserError: transformers has no such model.
    """
    settings = hf_config_of(config.model) | {"torch_dtype": "float32", "use_cache": False}
    hf = transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    for name, value in vars(hf).items():
        if isinstance(value, float) and name.endswith(("dropout", "pdrop")):
            setattr(hf, name, 0.0)
    hf._experts_implementation = "eager"  # the fused GEMMs need sizes that are multiples of 16 bytes
    return hf


def hf_class(config: Config) -> Any:
    """Return transformers' class of the model.

    Raises:
        UserError: transformers has no such model, or it is not a causal language model.
    """
    if not config.model.is_causal:
        raise UserError("transformers' model is judged as a causal language model, which this one is not")
    (name,) = hf_config_of(config.model)["architectures"]
    return getattr(transformers, name)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return trained parameters and saved buffers by name; tied ones once."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def from_megalite(config: Config, full: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return transformers' tensors by the names and in the shapes of its modules, which stack experts."""
    family = family_of(config.model)
    in_files = {family.full_name(name): each for name, each in to_hf(full, config.model).items()}
    with torch.device("meta"):
        model = hf_class(config)(hf_config(config))
    tensors: dict[str, Tensor] = {}
    for name, expected in saved_tensors(model).items():
        groups = family.names_in_files(name, config.model.num_experts or 1)
        if missing := [part for group in groups for part in group if part not in in_files]:
            raise UserError(f"megalite's model has no tensor for {name}: {missing[0]} is missing")
        parts = [torch.cat([in_files.pop(part) for part in group]) for group in groups]
        tensors[name] = torch.stack(parts) if parts[0].dim() < expected.dim() else parts[0]
        if tensors[name].shape != expected.shape:
            raise UserError(
                f"{name} is {list(expected.shape)} in transformers, {list(tensors[name].shape)} in megalite"
            )
    if in_files:
        raise UserError(f"transformers' model has no tensor for {next(iter(in_files))}")
    return tensors
