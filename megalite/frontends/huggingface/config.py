"""Read our config from a model's ``config.json``, and write one from which transformers builds our model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import Config, ModelConfig
from megalite.config.fields import config_fields
from megalite.config.validate import range_problems
from megalite.frontends.huggingface.families import FAMILIES, family_of
from megalite.frontends.huggingface.settings import HF_ACTIVATIONS, TOKEN_IDS
from megalite.utils.errors import UserError, shortened

HFConfig = Mapping[str, Any]

KEPT = ("model_type", "activation_function", *TOKEN_IDS, "pretraining_tp", "slow_but_exact")
"""Settings without a field in megalite's config. A conversion records them, to write them back later."""
RECORDED = "hugging_face"
"""Key of these settings in a checkpoint's run.json."""
TOKENS = "token_ids"
"""Key of what has become of the recorded token ids, if a conversion cannot write them back as they are."""
REPLACED, TRAINED = "replaced", "trained"
"""Its values: flags have replaced the tokenizer, or documents of a run end with the tokenizer's token."""


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


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


def recorded_of(hf: Any, changes_tokenizer: bool) -> dict[str, Any] | None:
    """Return the settings of `KEPT` that are present, to be written back; None if there are none.

    Args:
        hf: ``config.json``, or the settings that an earlier conversion recorded.
        changes_tokenizer: whether the user names another tokenizer, which has its own token ids.
    """
    if not isinstance(hf, Mapping):
        return None
    if changes_tokenizer or hf.get(TOKENS) == REPLACED:
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
        "torch_dtype": _DTYPES[config.params_dtype],
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
