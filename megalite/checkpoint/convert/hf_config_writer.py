"""Write the ``config.json`` from which transformers builds our model; `hf_config` reads it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HF_ACTIVATIONS, TOKEN_IDS
from megalite.checkpoint.convert.hf_config import KEPT, REPLACED, TOKENS, TRAINED
from megalite.checkpoint.convert.hf_tensors import FAMILIES, family_of
from megalite.checkpoint.manifest import dtype_name
from megalite.config import ModelConfig
from megalite.model.stage import DTYPES


def hf_config_of(
    config: ModelConfig, eod: int | None = None, recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return transformers' config of a model.

    Args:
        eod: id of the token that ends a document.
        recorded: the settings of `KEPT` in the config.json that the model came from, if it came from one.

    Raises:
        UserError: transformers has no such model.
    """
    family = family_of(config, None if recorded is None else recorded.get("model_type"))
    written = {
        **family.settings(config),
        "bos_token_id": eod if family.model_type == "gpt2" else None,  # GPT-2 also begins texts with it
        "eos_token_id": eod,
        "pad_token_id": None,  # by default SmolLM 3 has one, which a small vocabulary does not
        "torch_dtype": dtype_name(DTYPES[config.params_dtype]),
    }
    if recorded is None or FAMILIES.get(recorded.get("model_type", "")) is not family:
        return written
    kept = {name: value for name, value in recorded.items() if name in KEPT and name != "model_type"}
    if HF_ACTIVATIONS.get(kept.get("activation_function", "")) != config.activation:
        kept.pop("activation_function", None)  # the activation has changed since, or has no other name
    if recorded.get(TOKENS) == REPLACED:
        return written | kept
    if recorded.get(TOKENS) == TRAINED and eod is not None:
        kept["eos_token_id"] = with_end(kept.get("eos_token_id"), eod)
    # transformers has a default for a token that config.json does not name; null would change it.
    return {name: value for name, value in written.items() if name not in TOKEN_IDS} | kept


def with_end(ids: Any, eod: int) -> Any:
    """Return an `eos_token_id`, one or several, with the token that ended documents in a run."""
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if eod in several:
        return ids
    return [eod, *several] if several else eod
