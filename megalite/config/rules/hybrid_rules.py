"""Rules for layers with one block, by --hybrid-override-pattern, and for Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of, flag_with_value
from megalite.config.layer_kind import HYBRID_KINDS
from megalite.config.rules.model_rules import divisors_near
from megalite.errors import Problem

PATTERN = "hybrid_override_pattern"
_OTHER_PATTERNS = ("linear_attention_freq", "moe_layer_freq", "no_rope_freq", "window_size")


def hybrid_pattern(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the pattern has one known letter for each layer."""
    model, pattern = config.model, config.model.hybrid_override_pattern
    if pattern is None:
        return
    setting = flag_with_value(PATTERN, pattern)
    if unknown := sorted({*pattern} - HYBRID_KINDS.keys()):
        yield Problem(
            (PATTERN,),
            f"{setting} has {' '.join(unknown)}: its letters are M (Mamba-2), * (attention), - (MLP) and E "
            "(experts)",
        )
    elif len(pattern) != model.num_layers:
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


def hybrid_features(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Refuse options that layers with one block do not have."""
    model = config.model
    if model.hybrid_override_pattern is None:
        return
    setting = flag_with_value(PATTERN, model.hybrid_override_pattern)
    for name in _OTHER_PATTERNS:
        if (value := getattr(model, name)) is not None:
            yield Problem(
                (PATTERN, name),
                f"{flag_with_value(name, value)} with {setting}, which names each layer: remove it",
            )
    if model.recurrent_mixer != "none":
        yield Problem(
            (PATTERN, "recurrent_mixer"),
            f"--recurrent-mixer {model.recurrent_mixer} with {setting}, which names each layer: remove one",
        )
    if model.norm_position != "pre" or model.parallel_residual:
        name = "parallel_residual" if model.parallel_residual else "norm_position"
        flag = flag_of(name) if model.parallel_residual else flag_with_value(name, model.norm_position)
        yield Problem(
            (PATTERN, name),
            f"{flag} with {setting}, whose layers have one block with a norm before it: remove it",
        )
    if not model.is_causal:
        yield Problem(
            (PATTERN, "architecture"),
            f"{setting} with a {model.architecture}, whose layers have two blocks: remove it",
        )


def mamba_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that groups have equal numbers of heads, and that tp divides the groups."""
    model, tp = config.model, config.parallel.tp
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
    if sizes.num_groups % tp:
        yield Problem(
            ("mamba_num_groups", PATTERN, "tensor_model_parallel_size"),
            f"--mamba-num-groups {sizes.num_groups} is not divisible by --tp {tp}: pass --tp "
            f"{divisors_near(sizes.num_groups, tp)}; each rank takes whole groups with their heads",
        )
