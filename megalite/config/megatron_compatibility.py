"""The rules of Megatron-LM's and Megatron-DeepSpeed's flags that are not fields of the config."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megalite.config.arguments import Diagnostics, FlagTokens
from megalite.config.config import Config
from megalite.config.megatron_flags import (
    ACCEPTED,
    ACCEPTED_IF_OFF,
    UNSUPPORTED,
    FlagIfOff,
    UnsupportedFeature,
)


@dataclass(frozen=True)
class CommandLine:
    """Hold the whole command line, for the rule of one of its flags.

    Attributes:
        config: the config of fields, YAML file and preset.
        flags: all flags, by their name with dashes.
        world_size: number of ranks, if the launcher sets it.
    """

    config: Config
    flags: Mapping[str, FlagTokens]
    world_size: int | None


FlagRule = Callable[[FlagTokens, CommandLine, Diagnostics], None]


def _not_needed(why: str, num_values: int = 0) -> FlagRule:
    """Return the rule of a flag that requests what is always the case."""

    def rule(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
        if len(flag.values) != num_values:
            wanted = "no value" if num_values == 0 else "one value"
            diagnostics.add_problem(f"{flag.name} takes {wanted}, but got {' '.join(flag.values) or 'none'}")
        else:
            diagnostics.notices.append(f"{' '.join((flag.name, *flag.values))} is not needed: {why}")

    return rule


def _only_off(entry: FlagIfOff) -> FlagRule:
    """Return the rule of a flag that is accepted with the values that turn its feature off."""

    def rule(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
        accepted = entry.off.split()
        if len(flag.values) == 1 and any(_is_same(flag.values[0], value) for value in accepted):
            diagnostics.notices.append(f"{flag.name} {flag.values[0]} is not needed: it is always so")
        else:
            found = " ".join(flag.values) or "no value"
            diagnostics.add_problem(
                f"{flag.name} only accepts {' or '.join(accepted)} in this version, not {found} "
                f"({entry.what}): {entry.fix}"
            )

    return rule


def _is_same(text: str, value: str) -> bool:
    """Return whether two values are equal, as numbers if both are numbers: 1.0 is 1."""
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value


def _unsupported(feature: UnsupportedFeature) -> FlagRule:
    def rule(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
        diagnostics.add_problem(
            f"{flag.name} ({feature.what}) is not supported in this version: {feature.fix}"
        )

    return rule


def _zero_stage(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    """Warn users of BLOOM's scripts of a difference; the flag itself is a field."""
    if flag.values == ("0",) and line.config.model.params_dtype == "bf16":
        diagnostics.notices.append(
            f"{flag.name} 0: every data-parallel rank holds the whole optimizer state. BLOOM's bf16 "
            "optimizer sharded it at stage 0 too: pass --zero-stage 1 for that"
        )


def _deepspeed(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    diagnostics.notices.append(
        f"{flag.name} adds Megatron-DeepSpeed's fields to the log line, no more: megalite does not use "
        "DeepSpeed; --deepspeed_config sets what its file says"
    )


def _gradients_in_fp32(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    dtype = line.config.parallel.grad_communication_dtype
    if dtype in ("bf16", "fp16"):
        diagnostics.add_problem(
            f"{flag.name} and --grad-communication-dtype {dtype} contradict each other: remove one"
        )
    else:
        _not_needed("gradient sums and their communication are in fp32")(flag, line, diagnostics)


def _group_query_attention(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    if line.config.model.num_query_groups is None:
        diagnostics.add_problem(f"{flag.name} needs --num-query-groups: pass it, or remove {flag.name}")
    else:
        diagnostics.notices.append(f"{flag.name} is not needed: --num-query-groups turns it on")


def _local_rank(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    """Compare with LOCAL_RANK, which is used: old launchers set both."""
    if " ".join(flag.values) != os.environ.get("LOCAL_RANK"):
        diagnostics.add_problem(
            f"{flag.name} {' '.join(flag.values)} differs from LOCAL_RANK={os.environ.get('LOCAL_RANK', '')} "
            "in the environment, which is used: start with torchrun, or set LOCAL_RANK"
        )


_RULES: dict[str, FlagRule] = {
    "--group-query-attention": _group_query_attention,
    "--local-rank": _local_rank,
    "--accumulate-allreduce-grads-in-fp32": _gradients_in_fp32,
}
"""Flags whose value is checked against other settings."""

REMARKS: dict[str, FlagRule] = {"--zero-stage": _zero_stage, "--deepspeed": _deepspeed}
"""Flags of fields that users of other programs need a notice about."""


@functools.cache
def megatron_rules() -> Mapping[str, FlagRule]:
    """Return the rule of every flag that is not a field's, by its name with dashes."""
    rules: dict[str, FlagRule] = dict(_RULES)
    for accepted in ACCEPTED:
        for flag in accepted.flags.split():
            rules[f"--{flag}"] = _not_needed(accepted.why, accepted.num_values)
    for off in ACCEPTED_IF_OFF:
        rules[off.flag] = _only_off(off)
    for feature in UNSUPPORTED:
        for flag in feature.flags.split():
            rules[f"--{flag}"] = _unsupported(feature)
    return rules


def rule_of(flag: str) -> FlagRule | None:
    """Return the rule of a flag, of which only the beginning may be known; None for an unknown flag."""
    if rule := megatron_rules().get(flag):
        return rule
    for feature in UNSUPPORTED:
        if flag.startswith(tuple(f"--{prefix}" for prefix in feature.prefixes.split())):
            return _unsupported(feature)
    return None


def accepted_flags() -> list[str]:
    """Return the flags that are not fields', without those that are always refused."""
    return sorted(megatron_rules().keys() - refused_flags())


def refused_flags() -> set[str]:
    """Return the flags of missing features."""
    return {f"--{flag}" for feature in UNSUPPORTED for flag in feature.flags.split()}
