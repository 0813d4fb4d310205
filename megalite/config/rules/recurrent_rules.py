"""Rules for recurrent mixers, and for layers with one block, by --hybrid-override-pattern."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules.model_rules import pattern_problems
from megalite.config.rules.sizes import divisors_near, not_divisible
from megalite.utils.errors import Problem

_MIXER, _FREQ = "recurrent_mixer", "linear_attention_freq"
_KEYS, _VALUES = "linear_num_key_heads", "linear_num_value_heads"


def recurrent_layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that some layers have the recurrent mixer, in a model that can have them."""
    model = config.model
    if model.recurrent_mixer == "none":
        return
    setting = flag_with_value(_MIXER, model.recurrent_mixer)
    if model.linear_attention_freq is None:
        return
    pattern = flag_with_value(_FREQ, model.linear_attention_freq)
    if problems := list(pattern_problems(config, _FREQ, model.linear_attention_freq)):
        yield from problems
    elif all(spec.attention is not None for spec in model.layer_specs):
        yield Problem(
            (_FREQ, _MIXER), f"{pattern} leaves no layer with {setting}: remove both it and --recurrent-mixer"
        )


def delta_net_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that key heads serve equal numbers of value heads."""
    model = config.model
    if model.recurrent_mixer != "gated_delta_net":
        return
    fix = "pass --linear-num-value-heads {multiple}, or --linear-num-key-heads {divisors}"
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    yield from not_divisible(_VALUES, values, "--linear-num-key-heads", keys, fix, (_KEYS,))


def exchanged_recurrent_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that context-parallel ranks can divide the recurrent heads of a tensor-parallel rank."""
    tp, cp = config.parallel.tp, config.parallel.cp
    for spec in config.model.recurrences if cp > 1 else ():
        number = spec.num_parts // tp
        if spec.num_parts % tp == 0 and number % cp:
            rank = f" of each of {tp} tensor-parallel ranks" if tp > 1 else ""
            yield Problem(
                (spec.cut_by, "context_parallel_size", "tensor_model_parallel_size"),
                f"{flag_of(spec.cut_by)} {spec.num_parts} with --cp {cp}, over which the {number}{rank} "
                f"cannot be split: pass --cp {divisors_near(number, cp)}; each rank computes whole "
                f"{spec.part} for all tokens",
            )


PATTERN = "hybrid_override_pattern"


def hybrid_pattern(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the pattern has one letter for each layer."""
    model, pattern = config.model, config.model.hybrid_override_pattern
    if pattern is None:
        return
    setting = flag_with_value(PATTERN, pattern)
    if len(pattern) != model.num_layers:
        yield Problem(
            (PATTERN, "num_layers"),
            f"{setting} has {len(pattern)} letters, not one for each of --num-layers {model.num_layers}: "
            f"pass --num-layers {len(pattern)}, or another pattern",
        )
    if ("E" in pattern) != model.has_experts:
        yield Problem(
            (PATTERN, "num_experts"),
            f"{setting} has layers with experts: pass --num-experts"
            if "E" in pattern
            else f"{setting} leaves no layer with experts: remove --num-experts {model.num_experts}",
        )


def mamba_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that groups have equal numbers of heads."""
    model = config.model
    if not model.has_mamba:
        return
    sizes = model.mamba
    if model.mamba_num_heads is None and 2 * model.hidden_size % sizes.head_dim:
        yield Problem(
            ("mamba_head_dim", "hidden_size", PATTERN),
            f"--mamba-head-dim {sizes.head_dim} does not divide twice --hidden-size {model.hidden_size}: "
            f"pass --mamba-head-dim {divisors_near(2 * model.hidden_size, sizes.head_dim)}, or "
            "--mamba-num-heads",
        )
    elif sizes.num_heads % sizes.num_groups:
        yield Problem(
            ("mamba_num_groups", "mamba_num_heads", "mamba_head_dim", "hidden_size", PATTERN),
            f"--mamba-num-groups {sizes.num_groups} does not divide the {sizes.num_heads} heads of Mamba-2: "
            f"pass --mamba-num-groups {divisors_near(sizes.num_heads, sizes.num_groups)}",
        )
