"""The flags of Megatron-FSDP, and their conversion to fields: its strategies are the stages of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.config.arguments import Diagnostics, FlagTokens, UserSetting
from megalite.config.fields import fields_by_flag

FSDP_FLAGS = {
    "--use-megatron-fsdp": "Shard as --data-parallel-sharding-strategy requests.",
    "--use-custom-fsdp": "An older name of --use-megatron-fsdp.",
    "--data-parallel-sharding-strategy": "With --use-megatron-fsdp: no_shard, optim, optim_grads or "
    "optim_grads_params, which are --zero-stage 0, 1, 2 and 3.",
    "--megatron-fsdp-grad-comm-dtype": "With --use-megatron-fsdp: fp32, bf16 or fp16 sets "
    "--grad-communication-dtype; auto is its default.",
}
"""The flags, with their help."""
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
