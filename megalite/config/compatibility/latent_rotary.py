"""Megatron-LM's flags for the rotary positions of multi-latent attention, and their conversion to fields.

They describe YaRN, Megatron's default for multi-latent attention. `--rotary-scaling-factor` is 1 there by
default, with which YaRN changes nothing. So a command line without these flags has the same positions in
Megatron and here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalite.config.arguments import Diagnostics, FlagTokens, UserSetting
from megalite.config.fields import fields_by_flag
from megalite.config.flags import flag_of
from megalite.config.model import ModelConfig

LATENT_ROTARY_FLAGS = {
    "--rope-type": "With --multi-latent-attention: scale positions as YaRN (yarn), or not at all (rope).",
    "--rotary-scaling-factor": "With --multi-latent-attention: factor of YaRN; by default 1, without YaRN.",
    "--mscale": "With --multi-latent-attention: --yarn-mscale; by default 1.",
    "--mscale-all-dim": "With --multi-latent-attention: --yarn-mscale-all-dim; by default 0.",
}
"""The flags, with their help."""
_TYPE, _FACTOR, _MSCALE, _MSCALE_ALL = LATENT_ROTARY_FLAGS
OFF_WITHOUT_LATENTS = {_TYPE: "rope", _FACTOR: "1", _MSCALE: "1", _MSCALE_ALL: "0"}
"""The only value of each flag in a model with other attention, in which Megatron does not read it."""
_ORIGINAL_LENGTH = 4096
_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    _FACTOR: (lambda value: 0 < value < math.inf, "a number above 0"),
    _MSCALE: (lambda value: 0 < value < math.inf, "a number above 0"),
    _MSCALE_ALL: (lambda value: 0 <= value < math.inf, "a number that is at least 0"),
}


def latent_rotary_settings(
    model: ModelConfig,
    by_flags: Mapping[str, UserSetting],
    flags: Sequence[FlagTokens],
    diagnostics: Diagnostics,
) -> dict[str, UserSetting]:
    """Return the fields that the flags set in a model with multi-latent attention, by name.

    What no flag sets is as in the model if it has YaRN, and otherwise as in Megatron.

    Args:
        by_flags: what other flags set, by field; a contradiction is reported.
    """
    passed = {flag.flag: flag for flag in flags if flag.flag in LATENT_ROTARY_FLAGS}
    if not passed or not model.multi_latent_attention:
        return {}
    values = {name: _value_of(flag, diagnostics) for name, flag in passed.items()}
    if None in values.values():
        return {}
    has_yarn = model.rope_scaling == "yarn"
    factor = values.get(_FACTOR, model.rope_scaling_factor if has_yarn else 1.0)
    mscale = values.get(_MSCALE, model.yarn_mscale or 1.0)
    mscale_all = values.get(_MSCALE_ALL, model.yarn_mscale_all_dim or 0.0)
    fields: dict[str, Any]
    if values.get(_TYPE) == "rope" or factor == 1.0:
        _report_unused(passed, factor, values.get(_MSCALE_ALL, 0.0), diagnostics)
        fields = {"rope_scaling": "none"}
    else:
        fields = _yarn(factor, mscale, mscale_all)
        length = "original_max_position_embeddings"
        if not has_yarn and length not in by_flags and getattr(model, length) == getattr(ModelConfig, length):
            fields[length] = _ORIGINAL_LENGTH
    return {
        name: _setting(name, value, passed, by_flags.get(name), diagnostics) for name, value in fields.items()
    }


def _value_of(flag: FlagTokens, diagnostics: Diagnostics) -> Any:
    """Return the value of a flag, or None after an error."""
    if flag.flag == _TYPE:
        value, wanted = " ".join(flag.values), "rope or yarn"
        if value in ("rope", "yarn"):
            return value
    else:
        is_valid, wanted = _NUMBERS[flag.flag]
        try:
            (number,) = map(float, flag.values)
            if is_valid(number):
                return number
        except ValueError:
            pass
    found = " ".join(flag.values) or "none"
    diagnostics.add_problem(f"{flag.name} takes {wanted}, but got {found}", "rope_scaling")
    return None


def _yarn(factor: float, mscale: float, mscale_all: float) -> dict[str, Any]:
    """Return the fields of YaRN."""
    fields: dict[str, Any] = {"rope_scaling": "yarn", "rope_scaling_factor": factor}
    if mscale_all > 0:
        return {**fields, "yarn_mscale": mscale, "yarn_mscale_all_dim": mscale_all}
    fields |= {"yarn_mscale": None, "yarn_mscale_all_dim": None}
    if mscale != 1.0:  # by default the factor of cosines and sines is the one of 1
        fields["yarn_attention_factor"] = 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0
    return fields


_SET_BY = {
    "rope_scaling": (_TYPE, _FACTOR),
    "rope_scaling_factor": (_FACTOR,),
    "yarn_mscale": (_MSCALE, _MSCALE_ALL),
    "yarn_mscale_all_dim": (_MSCALE_ALL, _MSCALE),
    "yarn_attention_factor": (_MSCALE,),
}
"""The flags that set a field, the one with the same meaning first."""


def _setting(
    name: str,
    value: Any,
    passed: Mapping[str, FlagTokens],
    of_user: UserSetting | None,
    diagnostics: Diagnostics,
) -> UserSetting:
    """Return the setting of a field; report another value that the user passed for it."""
    flag = next(passed[each] for each in (*_SET_BY.get(name, ()), *passed) if each in passed)
    setting = UserSetting(fields_by_flag()[flag_of(name)], value, flag.name, " ".join(flag.values))
    if of_user is not None and of_user.value != value:
        diagnostics.by_field([of_user, setting])
    return setting


def _report_unused(
    passed: Mapping[str, FlagTokens], factor: float, mscale_all: float, diagnostics: Diagnostics
) -> None:
    """Report flags without effect on positions that are not scaled."""
    is_rope = _TYPE in passed and passed[_TYPE].values == ("rope",)
    if is_rope and factor > 1.0 and mscale_all > 0:
        diagnostics.add_problem(
            f"--rope-type rope with --rotary-scaling-factor {factor:g} and --mscale-all-dim {mscale_all:g}: "
            "Megatron scales the scores but not the positions; pass --rope-type yarn, or remove "
            "--mscale-all-dim",
            "rope_scaling",
        )
        return
    why = "--rope-type is rope" if is_rope else "--rotary-scaling-factor is 1"
    has_effect = (_TYPE,) if is_rope else (_FACTOR,)
    diagnostics.notices.extend(
        f"{' '.join((flag.name, *flag.values))} has no effect: {why}"
        for name, flag in passed.items()
        if name not in has_effect
    )
