"""All families of transformers: choose the one of a model, and convert the model's config and tensors.

A config is read from a model's ``config.json``, or written as one from which transformers builds our model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megalite.config import Config, ModelConfig
from megalite.config.fields import config_fields
from megalite.config.validate import range_problems
from megalite.frontends.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from megalite.frontends.huggingface.dense import (
    APERTUS,
    ARCEE,
    ERNIE4_5,
    EXAONE4,
    GLM,
    GLM4,
    GRANITE,
    GRANITE_SWA,
    HELIUM,
    HUNYUAN_V1_DENSE,
    MINISTRAL,
    PHI3,
    SEED_OSS,
)
from megalite.frontends.huggingface.family import UNREADABLE, Entry, Family
from megalite.frontends.huggingface.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from megalite.frontends.huggingface.gpt import (
    BERT,
    BLOOM,
    COHERE,
    COHERE2,
    GPT2,
    GPT_NEOX,
    GPTJ,
    NEMOTRON,
    PHI,
    STABLELM,
    STARCODER2,
)
from megalite.frontends.huggingface.hybrids import FALCON_H1, LFM2, OLMO_HYBRID
from megalite.frontends.huggingface.kimi import KIMI_LINEAR
from megalite.frontends.huggingface.llama import (
    GPT_OSS,
    LLAMA,
    MINIMAX_M2,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    OLMOE,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from megalite.frontends.huggingface.mamba import BAMBA, GRANITEMOEHYBRID, NEMOTRON_H
from megalite.frontends.huggingface.qwen import QWEN2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from megalite.frontends.huggingface.settings import HF_ACTIVATIONS, TOKEN_IDS
from megalite.frontends.huggingface.sparse import (
    AFMOE,
    DOTS1,
    ERNIE4_5_MOE,
    EXAONE_MOE,
    FLEX_OLMO,
    GRANITEMOE,
    HUNYUAN_V1_MOE,
    HY_V3,
    SOLAR_OPEN,
)
from megalite.utils.errors import UserError, shortened

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *(GPT2, BLOOM, LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3, GEMMA2, GEMMA3),
        *(GEMMA4, GPT_NEOX, GPTJ, BERT, MIXTRAL, QWEN3_MOE, OLMOE, DEEPSEEK_V3, DEEPSEEK_V2),
        *(QWEN3_NEXT, QWEN3_5, NEMOTRON_H, QWEN2_MOE, QWEN3_5_MOE, GLM4_MOE, MINIMAX_M2, GPT_OSS),
        *(ARCEE, SEED_OSS, PHI3, GLM, GLM4, ERNIE4_5, HELIUM, MINISTRAL, EXAONE4, GEMMA),
        *(STARCODER2, STABLELM, PHI, NEMOTRON, FLEX_OLMO, DOTS1, SOLAR_OPEN, EXAONE_MOE, HY_V3, AFMOE),
        *(GRANITE, GRANITE_SWA, GRANITEMOE, GRANITEMOEHYBRID, COHERE, COHERE2, HUNYUAN_V1_DENSE),
        *(HUNYUAN_V1_MOE, ERNIE4_5_MOE, APERTUS, BAMBA, LFM2, FALCON_H1, OLMO_HYBRID, KIMI_LINEAR),
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
    """Return how far a family is from a model: the kinds of model, layers, norms and positions come first."""
    kinds = "architecture", "hybrid_override_pattern", "normalization", "position_embedding_type"
    first = (UNREADABLE, *kinds)
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
