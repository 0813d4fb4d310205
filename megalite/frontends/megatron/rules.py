"""Rules for the flags of Megatron-LM and Megatron-DeepSpeed that are not fields of the config."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.arguments import FlagTokens
from megalite.config.config import Config
from megalite.config.option import flag_with_value
from megalite.frontends import read_table
from megalite.frontends.megatron.conversions import FSDP_FLAGS, OFF_WITHOUT_LATENTS


@dataclass(frozen=True)
class CommandLine:
    """Flags and config of a command line, as the rule of one flag sees them.

    Attributes:
        config: the config from flags of fields, YAML file and preset.
        flags: all flags, by their name with dashes.
    """

    config: Config
    flags: Mapping[str, FlagTokens]


FlagRule = Callable[[FlagTokens, CommandLine], str | None]
"""Checks a flag: returns a notice to log, if there is one, or raises a `ValueError` with the problem."""


class FlagGroup(NamedTuple):
    """Flags of one row of ``flags.yaml``, whose comments explain the columns.

    Attributes:
        topic: a group of the config.
        flags: the flags with dashes, with the number of their values; None for any number.
    """

    topic: str
    flags: Mapping[str, int | None]
    prefixes: tuple[str, ...]
    why: str
    feature: str
    fix: str
    accepts: tuple[str, ...]
    of_experts: bool


@functools.cache
def flag_groups(table: str) -> tuple[FlagGroup, ...]:
    """Return the rows of a table of ``flags.yaml``."""
    num_values = {"": 0, "1": 1, "*": None}
    topics = read_table("megatron/flags.yaml")[table]
    return tuple(
        FlagGroup(
            topic,
            {
                f"--{name}": num_values[values]
                for name, _, values in (flag.partition("=") for flag in row.get("flags", "").split())
            },
            tuple(f"--{prefix}" for prefix in row.get("prefixes", "").split()),
            row.get("why", ""),
            row.get("feature", ""),
            row.get("fix", ""),
            tuple(row.get("accepts", "").split()),
            row.get("of_experts", False),
        )
        for topic, rows in topics.items()
        for row in rows
    )


_ALWAYS_SO = "it is always so"
_NEGATIONS = ("--no-", "--disable-")


def _written(flag: FlagTokens) -> str:
    return " ".join((flag.name, *flag.values))


def _not_needed(why: str, num_values: int | None = 0) -> FlagRule:
    """Return the rule of a flag that requests the only behavior; it takes `num_values` values."""

    def rule(flag: FlagTokens, line: CommandLine) -> str:
        if num_values is not None and len(flag.values) != num_values:
            wanted = "no value" if num_values == 0 else "one value"
            raise ValueError(f"{flag.name} takes {wanted}, but got {' '.join(flag.values) or 'none'}")
        return f"{_written(flag)} is not needed: {why}"

    return rule


def _only_off(accepted: tuple[str, ...], feature: str, fix: str) -> FlagRule:
    """Return the rule of a flag that is accepted with the values that turn its feature off."""

    def rule(flag: FlagTokens, line: CommandLine) -> str:
        if not flag.values or not all(any(_is_same(value, off) for off in accepted) for value in flag.values):
            found = " ".join(flag.values) or "no value"
            raise ValueError(
                f"{flag.name} only accepts {' or '.join(accepted)} in this version, not {found} "
                f"({feature}): {fix}"
            )
        return f"{_written(flag)} is not needed: {_ALWAYS_SO}"

    return rule


def _is_same(text: str, value: str) -> bool:
    """Return whether two values are equal, as numbers if both are numbers: 1.0 is 1."""
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value


def _unsupported(feature: FlagGroup) -> FlagRule:
    def rule(flag: FlagTokens, line: CommandLine) -> str:
        if feature.of_experts and not line.config.model.has_experts:
            return f"{_written(flag)} has no effect: the model has no experts"
        raise ValueError(f"{flag.name} ({feature.feature}) is not supported in this version: {feature.fix}")

    return rule


def _no_position_embedding(flag: FlagTokens, line: CommandLine) -> str | None:
    kind = line.config.model.position_embedding_type
    if kind == "learned_absolute":
        raise ValueError(
            f"{flag.name} does not say what replaces the position embedding: pass "
            "--position-embedding-type none, rope or alibi"
        )
    why = f"{flag_with_value('position_embedding_type', kind)} has no position embedding"
    return _not_needed(why)(flag, line)


def _no_pipeline_parallel(flag: FlagTokens, line: CommandLine) -> str | None:
    stages = flag_with_value("pipeline_model_parallel_size", line.config.parallel.pp)
    if line.config.parallel.pp > 1:
        raise ValueError(f"{flag.name} and {stages} contradict each other: remove one")
    return _not_needed(f"{stages} has no pipeline")(flag, line)


def _zero_stage(flag: FlagTokens, line: CommandLine) -> str | None:
    """Warn users of BLOOM's scripts about a difference; the flag itself sets a field."""
    if flag.values != ("0",) or line.config.model.params_dtype != "bf16":
        return None
    return (
        f"{flag.name} 0: every data-parallel rank holds the whole optimizer state. BLOOM's bf16 "
        "optimizer sharded it at stage 0 too: pass --zero-stage 1 to shard it"
    )


def _balance(flag: FlagTokens, line: CommandLine) -> str | None:
    """Report that a loss over each microbatch depends on its size."""
    if flag.values != ("aux_loss",) or not line.config.model.has_experts:
        return None
    return f"{flag.name} aux_loss depends on --micro-batch-size; seq_aux_loss and global_aux_loss do not"


def _deepspeed(flag: FlagTokens, line: CommandLine) -> str:
    return (
        f"{flag.name} only adds Megatron-DeepSpeed's fields to the log line: megalite does not use "
        "DeepSpeed; --deepspeed_config reads settings from its file"
    )


def _gradients_in_fp32(flag: FlagTokens, line: CommandLine) -> str | None:
    dtype = line.config.parallel.grad_communication_dtype
    if dtype in ("bf16", "fp16"):
        raise ValueError(
            f"{flag.name} and --grad-communication-dtype {dtype} contradict each other: remove one"
        )
    return _not_needed("gradient sums and their communication are in fp32")(flag, line)


def _group_query_attention(flag: FlagTokens, line: CommandLine) -> str:
    if line.config.model.num_query_groups is None:
        raise ValueError(f"{flag.name} needs --num-query-groups: pass it, or remove {flag.name}")
    return f"{flag.name} is not needed: --num-query-groups turns it on"


def _local_rank(flag: FlagTokens, line: CommandLine) -> None:
    """Compare --local-rank with LOCAL_RANK, since old launchers set both. LOCAL_RANK is used."""
    if " ".join(flag.values) != os.environ.get("LOCAL_RANK"):
        raise ValueError(
            f"{flag.name} {' '.join(flag.values)} differs from LOCAL_RANK={os.environ.get('LOCAL_RANK', '')} "
            "in the environment, which takes precedence: start with torchrun, or set LOCAL_RANK"
        )


def _use_mup(flag: FlagTokens, line: CommandLine) -> str | None:
    model = line.config.model
    if model.mup_base_width is None:
        raise ValueError(
            f"{flag.name} needs --mup-base-width (--mup-base-hidden-size): pass the hidden size for which "
            "the hyperparameters were tuned"
        )
    if model.mup_base_head_dim is None and model.query_pre_attn_scalar is None:
        raise ValueError(
            f"{flag.name} without --mup-base-head-dim: Megatron-LM divides scores by the head size, megalite "
            "by its root; pass --mup-base-head-dim 1 for Megatron-LM's scores, or the base model's head size"
        )
    return _not_needed("--mup-base-width turns it on")(flag, line)


def _latent_rotary(off: str) -> FlagRule:
    """Return the rule of a flag that sets fields in multi-latent attention, else accepted while off."""
    without_latents = _only_off((off,), "YaRN by this flag", "pass --rope-scaling and --rope-scaling-factor")
    return lambda flag, line: (
        None if line.config.model.multi_latent_attention else without_latents(flag, line)
    )


def _flex_dispatcher(flag: FlagTokens, line: CommandLine) -> str | None:
    """Report what sends tokens in the place of DeepEP and HybridEP."""
    if not _is_flex(flag):
        return None
    options = (line.flags[name] for name in _FLEX_OPTIONS if name in line.flags)
    return (
        f"{' '.join(map(_written, (flag, *options)))}: tokens are sent as by alltoall, with the same "
        "results; DeepEP and HybridEP are not used"
    )


def _flex_option(flag: FlagTokens, line: CommandLine) -> str | None:
    """Check an option of the flex dispatcher, which `_flex_dispatcher` reports."""
    values = " ".join(flag.values)
    if flag.flag == _FLEX_BACKEND and values not in ("deepep", "hybridep"):
        raise ValueError(f"{flag.name} cannot be {values!r}: choose one of deepep, hybridep")
    if _DISPATCHER in line.flags and _is_flex(line.flags[_DISPATCHER]):
        return None
    return f"{_written(flag)} has no effect: {_DISPATCHER} is not flex"


def _is_flex(flag: FlagTokens) -> bool:
    return [value.lower() for value in flag.values] == ["flex"]


_DISPATCHER, _FLEX_BACKEND = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"
_FLEX_OPTIONS = (
    _FLEX_BACKEND,
    *("--moe-enable-deepep", "--moe-deepep-num-sms", "--moe-flex-dispatcher-num-sms"),
    *("--moe-hybridep-num-sms", "--moe-hybridep-num-sms-preprocessing", "--moe-permute-fusion-into-hybridep"),
    *("--moe-hybridep-num-blocks-permute", "--moe-hybridep-num-blocks-unpermute"),
    *("--moe-hybridep-pad-uneven-dispatch-inputs", "--moe-ncclep-zero-copy"),
)
_RULES: dict[str, FlagRule] = {
    **dict.fromkeys(FSDP_FLAGS, lambda flag, line: None),  # they have set fields
    **dict.fromkeys(_FLEX_OPTIONS, _flex_option),
    **{flag: _latent_rotary(off) for flag, off in OFF_WITHOUT_LATENTS.items()},
    "--use-mup": _use_mup,
    "--group-query-attention": _group_query_attention,
    "--local-rank": _local_rank,
    "--no-position-embedding": _no_position_embedding,
    "--no-pipeline-parallel": _no_pipeline_parallel,
    "--accumulate-allreduce-grads-in-fp32": _gradients_in_fp32,
}
"""Flags whose value is checked against other settings."""

REMARKS: dict[str, FlagRule] = {
    "--zero-stage": _zero_stage,
    "--deepspeed": _deepspeed,
    "--moe-router-load-balancing-type": _balance,
    _DISPATCHER: _flex_dispatcher,
}
"""Flags that set fields, but behave differently than users of other programs may expect."""


@functools.cache
def megatron_rules() -> Mapping[str, FlagRule]:
    """Return the rule of every flag that does not set a field, by its name with dashes."""
    rules: dict[str, FlagRule] = dict(_RULES)
    for group in flag_groups("accepted"):
        rules |= {flag: _not_needed(group.why, num_values) for flag, num_values in group.flags.items()}
    for group in flag_groups("accepted_if_off"):
        rules |= dict.fromkeys(group.flags, _only_off(group.accepts, group.feature, group.fix))
    for group in flag_groups("unsupported"):
        rules |= dict.fromkeys(group.flags, _unsupported(group))
    return rules


@functools.cache
def _negated_rules() -> Mapping[str, FlagRule]:
    """Return the rules of flags that change nothing, by their name without `--no-` or `--disable-`."""
    return {
        _stem(flag): _not_needed(group.why)
        for group in flag_groups("accepted")
        for flag, num_values in group.flags.items()
        if num_values == 0
    }


def rule_of(flag: str) -> FlagRule | None:
    """Return the rule of a flag; None for an unknown one.

    For the flags of an unsupported feature, only a prefix may be known. A flag that turns off an unsupported
    feature, or one that changes nothing, is accepted as not needed.
    """
    if rule := megatron_rules().get(flag):
        return rule
    if feature := missing_feature(flag):
        return _unsupported(feature)
    stem = _stem(flag)
    if stem != flag:
        return _not_needed(_ALWAYS_SO) if missing_feature(stem) else _negated_rules().get(stem)
    return None


def _stem(flag: str) -> str:
    return next((f"--{flag[len(no) :]}" for no in _NEGATIONS if flag.startswith(no)), flag)


def missing_feature(flag: str) -> FlagGroup | None:
    """Return the unsupported feature that a flag requests."""
    features = flag_groups("unsupported")
    by_name = (feature for feature in features if flag in feature.flags)
    by_prefix = (feature for feature in features if flag.startswith(feature.prefixes))
    return next(itertools.chain(by_name, by_prefix), None)


def accepted_flags() -> list[str]:
    """Return the flags without a field of their own, without the flags that are always refused."""
    return sorted(megatron_rules().keys() - refused_flags())


def refused_flags() -> set[str]:
    """Return the flags of unsupported features."""
    return {flag for feature in flag_groups("unsupported") for flag in feature.flags}
