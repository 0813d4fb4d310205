"""Rules for layers with a recurrent mixer in the place of attention."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of, flag_with_value
from megalite.config.rules.model_rules import divisors_near
from megalite.config.rules.patterns import pattern_problems
from megalite.errors import Problem

_MIXER, _FREQ = "recurrent_mixer", "linear_attention_freq"
_KEYS, _VALUES = "linear_num_key_heads", "linear_num_value_heads"
_GROUPS = {_KEYS: "key heads with their value heads", "mamba_num_groups": "groups with their heads"}


def recurrent_layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that some layers have the recurrent mixer, in a model that can have them."""
    model = config.model
    if model.recurrent_mixer == "none":
        return
    setting = flag_with_value(_MIXER, model.recurrent_mixer)
    if not model.is_causal:
        yield Problem(
            (_MIXER, "architecture"),
            f"{setting} with a {model.architecture}, whose tokens also see later ones: remove it",
        )
    if model.linear_attention_freq is None:
        return
    pattern = flag_with_value(_FREQ, model.linear_attention_freq)
    if problems := list(pattern_problems(config, _FREQ, model.linear_attention_freq)):
        yield from problems
    elif all(kind.mixer == "attention" for kind in model.layer_kinds):
        yield Problem(
            (_FREQ, _MIXER), f"{pattern} leaves no layer with {setting}: remove both it and --recurrent-mixer"
        )


def delta_net_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that key heads serve equal numbers of value heads, and that tp divides the key heads."""
    model, tp = config.model, config.parallel.tp
    if model.recurrent_mixer != "gated_delta_net":
        return
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if values % keys:
        yield Problem(
            (_VALUES, _KEYS),
            f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}: pass "
            f"--linear-num-value-heads {-(-values // keys) * keys}, or --linear-num-key-heads "
            f"{divisors_near(values, keys)}",
        )
    if keys % tp:
        yield Problem(
            (_KEYS, "tensor_model_parallel_size"),
            f"--linear-num-key-heads {keys} is not divisible by --tp {tp}: pass --tp "
            f"{divisors_near(keys, tp)}; each rank takes whole key heads with their value heads",
        )


def exchanged_recurrent_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that context-parallel ranks can divide the recurrent heads of a tensor-parallel rank."""
    model, tp, cp = config.model, config.parallel.tp, config.parallel.cp
    if not model.has_recurrent_layers or cp == 1:
        return
    name = "mamba_num_groups" if model.has_mamba else _KEYS
    number = getattr(model, name)
    if number % tp or number // tp % cp == 0:
        return
    rank = f" of each of {tp} tensor-parallel ranks" if tp > 1 else ""
    yield Problem(
        (name, "context_parallel_size", "tensor_model_parallel_size"),
        f"{flag_of(name)} {number} with --cp {cp}, over which the {number // tp}{rank} cannot be split: pass "
        f"--cp {divisors_near(number // tp, cp)}; each rank computes whole {_GROUPS[name]} for all tokens",
    )


def recurrent_features(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Refuse features that recurrent layers do not have."""
    model, training = config.model, config.training
    if not model.has_recurrent_layers:
        return
    name = "hybrid_override_pattern" if model.has_mamba else _MIXER
    setting = flag_with_value(name, getattr(model, name))
    if training.compile:
        yield Problem(
            (name, "compile"),
            f"--compile with {setting}: recurrences are not compiled; remove --compile",
        )
    if training.fp8_format is not None:
        yield Problem(
            (name, "fp8_format"),
            f"--fp8-format {training.fp8_format} with {setting}: its decays need more than 8 bits; remove it",
        )
    if model.mup_base_width is not None:
        yield Problem(
            (name, "mup_base_width"),
            f"--mup-base-width {model.mup_base_width} with {setting}: muP has no rule for its decays; remove "
            "it",
        )
