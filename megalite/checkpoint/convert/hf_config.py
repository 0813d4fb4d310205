"""Read our config from the ``config.json`` of transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import TOKEN_IDS
from megalite.checkpoint.convert.hf_tensors import FAMILIES
from megalite.checkpoint.convert.model_settings import Settings
from megalite.config import Config, ModelConfig
from megalite.config.fields import config_fields
from megalite.config.validate import range_problems
from megalite.errors import UserError, shortened

HFConfig = Mapping[str, Any]

KEPT = ("model_type", "activation_function", *TOKEN_IDS, "pretraining_tp", "slow_but_exact")
"""Settings without a field in megalite's config. A conversion records them, to write them back later."""
RECORDED = "hugging_face"
"""Key of these settings in a checkpoint's run.json."""
TOKENS = "token_ids"
"""Key of what has become of the recorded token ids, if a conversion cannot write them back as they are."""
REPLACED, TRAINED = "replaced", "trained"
"""Its values: flags have replaced the tokenizer, or documents of a run end with the tokenizer's token."""


def config_of(hf: HFConfig) -> ModelConfig:
    """Return our config of the same model.

    Args:
        hf: ``config.json`` read as JSON, or a config's ``to_dict()``.

    Raises:
        UserError: megalite does not have the architecture, or one of its options.
    """
    kind = str(hf.get("model_type"))
    if kind not in FAMILIES:
        raise UserError(f"model_type {kind!r} cannot be converted: {', '.join(FAMILIES)} can")
    model = FAMILIES[kind].model(hf)
    _check_types(model)
    return model


def _check_types(model: ModelConfig) -> None:
    """Check that fields have their type, and numbers their range.

    Raises:
        UserError: the first field that is invalid.
    """
    kinds = {int: ((int,), "a number"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}
    for field in config_fields():
        if field.group == "model" and field.kind.item in kinds:
            value, (types, name) = getattr(model, field.name), kinds[field.kind.item]
            items = value if field.kind.is_many and isinstance(value, tuple) else (value,)
            has_type = all(
                isinstance(x, types) and isinstance(x, bool) == (field.kind.item is bool) for x in items
            )
            if not (has_type or (value is None and field.kind.is_optional)):
                shown = shortened(repr(value))
                raise UserError(f"transformers' config has {field.name} {shown}, which is not {name}")
    if problem := next(range_problems(Config(model=model)), None):
        raise UserError(f"transformers' config cannot be converted: {problem.text}")


def recorded_of(hf: Any, settings: Settings) -> dict[str, Any] | None:
    """Return the settings of `KEPT` that are present, to be written back; None if there are none.

    Args:
        hf: ``config.json``, or the settings that an earlier conversion recorded.
        settings: the user's settings; if they name another tokenizer, it has its own token ids.
    """
    if not isinstance(hf, Mapping):
        return None
    if settings.change_tokenizer or hf.get(TOKENS) == REPLACED:
        kept = {name: hf[name] for name in KEPT if name in hf and name not in TOKEN_IDS}
        return {**kept, TOKENS: REPLACED}
    kept = {name: hf[name] for name in KEPT if name in hf}
    return {**kept, TOKENS: TRAINED} if hf.get(TOKENS) == TRAINED else kept


def rounding_note(hf: HFConfig) -> str | None:
    """Return a note on matrix products that a model computes otherwise than here; None if there are none.

    BLOOM's `slow_but_exact`, and Llama in older versions of transformers, sum the GEMMs of `pretraining_tp`
    slices one after another, as the tensor-parallel ranks of the pretraining did.
    """
    slices, kind = hf.get("pretraining_tp") or 1, hf.get("model_type")
    if slices == 1 or (kind == "bloom" and not hf.get("slow_but_exact", False)):
        return None
    sums = f"pretraining_tp {slices}: transformers adds up {slices} slices of each matrix product"
    if kind == "bloom":
        return (
            f"slow_but_exact with {sums} and leaves out their biases, megalite computes it at once with them"
        )
    return f"{sums}, megalite computes it at once; results differ only by rounding"
