"""Megatron's flags that are converted to fields: of FSDP, of latents' positions, and of lengths in tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.config.arguments import Diagnostics, FlagTokens, UserSetting
from megalite.config.config import Config
from megalite.config.fields import fields_by_flag
from megalite.config.model.model_config import ModelConfig
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules.training_rules import batch_size_schedule, ramp_up
from megalite.config.validate import range_problems

FSDP_FLAGS = {
    "--use-megatron-fsdp": "Shard as --data-parallel-sharding-strategy requests.",
    "--use-custom-fsdp": "An older name of --use-megatron-fsdp.",
    "--data-parallel-sharding-strategy": "With --use-megatron-fsdp: no_shard, optim, optim_grads or "
    "optim_grads_params, which are --zero-stage 0, 1, 2 and 3.",
    "--megatron-fsdp-grad-comm-dtype": "With --use-megatron-fsdp: fp32, bf16 or fp16 sets "
    "--grad-communication-dtype; auto is its default.",
}
"""The flags of Megatron-FSDP, whose strategies are the stages of ZeRO, with their help."""
_SWITCH, _OLDER_SWITCH, _STRATEGY, _MESSAGES = FSDP_FLAGS
_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_DTYPES = {"auto": None, "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_FIELDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    _STRATEGY: ("--zero-stage", _STAGES),
    _MESSAGES: ("--grad-communication-dtype", _DTYPES),
}


def fsdp_settings(
    by_flags: Mapping[str, UserSetting], flags: Sequence[FlagTokens], diagnostics: Diagnostics
) -> dict[str, UserSetting]:
    """Return the fields that the flags set, by name.

    Args:
        by_flags: what other flags set, by field; a contradiction is reported.
            `--use-distributed-optimizer` does not: Megatron needs it beside each strategy.
    """
    passed = {flag.flag: flag for flag in flags if flag.flag in FSDP_FLAGS}
    for name in (_SWITCH, _OLDER_SWITCH):
        if name in passed and passed[name].values:
            diagnostics.add_problem(f"{passed[name].name} takes no value, but got {passed[name].values[0]}")
    settings = {}
    for name, (field_flag, meanings) in _FIELDS.items():
        if name not in passed:
            continue
        flag, field = passed[name], fields_by_flag()[field_flag]
        text = " ".join(flag.values)
        if text not in meanings:
            diagnostics.add_problem(
                f"{flag.name} cannot be {text!r}: choose one of {', '.join(meanings)}", field.name
            )
        elif not passed.keys() & {_SWITCH, _OLDER_SWITCH}:
            diagnostics.notices.append(f"{flag.name} {text} has no effect: {_SWITCH} is not set")
        elif meanings[text] is not None:
            settings[field.name] = UserSetting(field, meanings[text], flag.name, text)
    for name, setting in settings.items():
        other = by_flags.get(name)
        if other and other.name.replace("_", "-") != "--use-distributed-optimizer":
            diagnostics.by_field([other, setting])
    return settings


LATENT_ROTARY_FLAGS = {
    "--rope-type": "With --multi-latent-attention: scale positions as YaRN (yarn), or not at all (rope).",
    "--rotary-scaling-factor": "With --multi-latent-attention: factor of YaRN; by default 1, without YaRN.",
    "--mscale": "With --multi-latent-attention: --yarn-mscale; by default 1.",
    "--mscale-all-dim": "With --multi-latent-attention: --yarn-mscale-all-dim; by default 0.",
}
"""The flags for the rotary positions of multi-latent attention, with their help.

They describe YaRN, Megatron's default there. `--rotary-scaling-factor` is 1 by default, with which YaRN
changes nothing. So a command line without these flags has the same positions in Megatron and here.
"""
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
    settings = {}
    for name, value in fields.items():
        flag = next(passed[each] for each in (*_SET_BY.get(name, ()), *passed) if each in passed)
        setting = UserSetting(fields_by_flag()[flag_of(name)], value, flag.name, " ".join(flag.values))
        other = by_flags.get(name)
        if other is not None and other.value != value:
            diagnostics.by_field([other, setting])
        settings[name] = setting
    return settings


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


TOKEN_FLAGS = {
    "--train-tokens": "End the run once it has consumed this many tokens, if it has not ended earlier.",
    "--lr-decay-tokens": "Consumed tokens at which the decay of the learning rate ends.",
    "--lr-warmup-tokens": "Tokens of the learning rate's linear warm-up.",
}
"""Megatron-DeepSpeed's flags for lengths in tokens, with their help."""
_SCHEDULES = ("lr_decay", "lr_warmup", "lr_wsd_decay", "weight_decay_incr")
_REPLACED = {
    "--lr-decay-tokens": ("lr_decay_iters", "lr_decay_samples"),
    "--lr-warmup-tokens": ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
}
"""Fields that a flag replaces, as in Megatron-DeepSpeed."""


def with_token_counts(config: Config, flags: Sequence[FlagTokens], diagnostics: Diagnostics) -> Config:
    """Return the config with lengths in tokens converted to samples of --seq-length tokens.

    The length of such a run is counted in samples: lengths in iterations are converted too.
    """
    tokens = {name: count for name in TOKEN_FLAGS if (count := _count(name, flags, diagnostics)) is not None}
    if not tokens:
        return config
    rules = (range_problems(config), ramp_up(config, None), batch_size_schedule(config, None))
    if any(itertools.chain(*rules)):
        # The rules of the config report these errors, but not that only the flags here set a length.
        if config.training.train_iters is None and config.training.train_samples is None:
            config = replace(config, training=replace(config.training, train_samples=max(tokens.values())))
        return config
    if config.training.global_batch_size is None:
        diagnostics.add_problem(f"{next(iter(tokens))} needs --global-batch-size: pass it", "train_iters")
        return config
    return _with_run_length(
        _in_samples(config, tokens, diagnostics), tokens.get("--train-tokens"), diagnostics
    )


def _count(name: str, flags: Sequence[FlagTokens], diagnostics: Diagnostics) -> int | None:
    """Return the value of a flag, such as 300000000000 or 300e9; None if it is not passed."""
    passed = [flag for flag in flags if flag.flag == name]
    if not passed:
        return None
    values = passed[-1].values
    try:
        (count,) = (float(value) for value in values)
        if count >= 1 and count.is_integer():
            return int(count)
    except ValueError:
        pass
    found = " ".join(values) or "none"
    diagnostics.add_problem(
        f"{name} takes one whole number of tokens above 0, but got {found}", "train_iters"
    )
    return None


def _in_samples(config: Config, tokens: dict[str, int], diagnostics: Diagnostics) -> Config:
    """Return the config with the run and its schedules in samples."""
    batch, optimizer, training = config.batch_size(1), config.optimizer, config.training
    defaults, changes = Config().optimizer, dict[str, Any]()
    for name in _SCHEDULES:
        if iterations := getattr(optimizer, f"{name}_iters"):
            changes[f"{name}_iters"] = getattr(defaults, f"{name}_iters")
            changes[f"{name}_samples"] = batch.consumed_before(iterations + 1)
    for flag, replaced in _REPLACED.items():
        if flag not in tokens:
            continue
        for name in replaced:
            if (value := getattr(optimizer, name)) != getattr(defaults, name):
                diagnostics.notices.append(
                    f"{flag_with_value(name, value)} has no effect: {flag} replaces it"
                )
            changes[name] = getattr(defaults, name)
        changes[replaced[1]] = tokens[flag] // config.model.seq_length
    if training.train_iters is not None and training.train_samples is None:
        samples = batch.consumed_before(training.train_iters + 1)
        training = replace(training, train_iters=None, train_samples=samples)
    return replace(config, training=training, optimizer=replace(optimizer, **changes))


def _with_run_length(config: Config, tokens: int | None, diagnostics: Diagnostics) -> Config:
    """Return the config with the samples of the iterations that consume these tokens.

    As in Megatron-DeepSpeed, the schedules keep the length that the run would have without --train-tokens.
    """
    if tokens is None:
        return config
    batch, optimizer, longest = config.batch_size(1), config.optimizer, config.training.train_samples
    samples = -(-tokens // config.model.seq_length)
    iterations = batch.num_iterations(samples)
    if batch.consumed_before(iterations + 1) < samples:
        iterations += 1
    samples = batch.consumed_before(iterations + 1)
    if longest is not None:
        if longest <= samples:
            diagnostics.notices.append(f"--train-tokens {tokens} has no effect: the run ends earlier")
            return config
        diagnostics.notices.append(f"--train-tokens {tokens} ends the run after {iterations} iterations")
        optimizer = replace(optimizer, lr_decay_samples=optimizer.lr_decay_samples or longest)
        if optimizer.weight_decay_incr_style != "constant":
            wd_samples = optimizer.weight_decay_incr_samples or longest
            optimizer = replace(optimizer, weight_decay_incr_samples=wd_samples)
    return replace(config, optimizer=optimizer, training=replace(config.training, train_samples=samples))
