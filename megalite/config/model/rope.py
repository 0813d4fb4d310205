"""Rotary position embedding: its options, and the spec of one layer's rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megalite.config.option import (
    NONZERO_SHARE,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Bound,
    Conflicts,
    Setting,
    option,
    other_than,
    require_both,
)

RopeScaling = Literal["none", "linear", "llama3", "yarn", "proportional"]

_ROPE: dict[str, Any] = {"same_shapes": True, "only_with": Setting("position_embedding_type", ("rope",))}
_SCALED: dict[str, Any] = {
    "same_shapes": True,
    "only_with": Setting("rope_scaling", ("linear", "llama3", "yarn")),
}
_LONGER = Setting("rope_scaling", ("llama3", "yarn"))
_LLAMA3: dict[str, Any] = {**_SCALED, "only_with": Setting("rope_scaling", ("llama3",)), "in_megatron": False}
_YARN: dict[str, Any] = {**_SCALED, "only_with": Setting("rope_scaling", ("yarn",)), "in_megatron": False}


@dataclass(frozen=True)
class RopeOptions:
    """Options of rotary positions."""

    section: ClassVar[str] = "rope"

    rotary_base: float = option(10000.0, "--rotary-position-embeddings-theta", allowed=POSITIVE, **_ROPE)
    """Base of the rotary position embedding; only with rope."""
    window_rotary_base: float | None = option(
        None,
        allowed=POSITIVE,
        same_shapes=True,
        only_with=(Setting("position_embedding_type", ("rope",)), Setting("window_size")),
        in_megatron=False,
    )
    """Base of the rotary position embedding in layers with a window (Gemma 3). By default --rotary-base."""
    rotary_percent: float = option(1.0, allowed=NONZERO_SHARE, **_ROPE)
    """Share of each head's elements that rotary positions rotate, from the first on."""
    rotary_interleaved: bool = option(False, **_ROPE)
    """Rotary positions rotate pairs of neighboring elements (GPT-J), instead of an element of the first and
    one of the second half (Llama)."""
    rope_scaling: RopeScaling = option(
        "none", sets={"--use-rope-scaling": "llama3"}, in_megatron=False, **_ROPE
    )
    """Change of the rotary frequencies for samples longer than --original-max-position-embeddings."""
    window_rope_scaling: bool = option(
        True,
        same_shapes=True,
        only_with=(
            Setting("rope_scaling", ("linear", "llama3", "yarn", "proportional")),
            Setting("window_size"),
        ),
        in_megatron=False,
    )
    """Also scale the rotary frequencies in layers with a window; OLMo 3 does not."""
    proportional_rotary_share: float = option(
        0.25,
        allowed=NONZERO_SHARE,
        same_shapes=True,
        only_with=Setting("rope_scaling", ("proportional",)),
        in_megatron=False,
    )
    """Share of the rotary frequencies, from the highest on, that --rope-scaling proportional keeps; the
    others are 0 (Gemma 4)."""
    rope_scaling_factor: float = option(8.0, allowed=POSITIVE, **_SCALED)
    """How many times longer the samples may be."""
    original_max_position_embeddings: int = option(
        8192,
        "--yarn-original-max-position-embeddings",
        allowed=SIZE,
        same_shapes=True,
        only_with=_LONGER,
        in_megatron=False,
    )
    """Sequence length before the change of the rotary frequencies."""
    rope_low_freq_factor: float = option(1.0, allowed=POSITIVE, **_LLAMA3)
    """Frequencies with fewer turns within the original length are divided by the factor."""
    rope_high_freq_factor: float = option(4.0, allowed=POSITIVE, **_LLAMA3)
    """Frequencies with more turns within the original length are kept."""
    yarn_beta_fast: float = option(32.0, "--beta-fast", allowed=POSITIVE, **_YARN)
    """Frequencies with more turns within the original length are kept."""
    yarn_beta_slow: float = option(1.0, "--beta-slow", allowed=POSITIVE, **_YARN)
    """Frequencies with fewer turns within the original length are divided by the factor."""
    yarn_truncate: bool = option(True, "--yarn-correction-range-round-to-int", **_YARN)
    """Round the two frequencies of --yarn-beta-fast and --yarn-beta-slow outward."""
    yarn_attention_factor: float | None = option(None, allowed=POSITIVE, **_YARN)
    """Factor of cosines and sines. By default 0.1 ln(factor) + 1, as in the paper."""
    yarn_mscale: float | None = option(None, allowed=POSITIVE, **_YARN)
    """With --yarn-mscale-all-dim A and factor f, cosines and sines are multiplied by (0.1 M ln f + 1) /
    (0.1 A ln f + 1)."""
    yarn_mscale_all_dim: float | None = option(None, allowed=POSITIVE, **_YARN)
    """The A of --yarn-mscale. In multi-latent attention, scores are also multiplied by (0.1 A ln f + 1)^2."""
    llama_4_scaling_beta: float | None = option(
        None, allowed=POSITIVE, same_shapes=True, only_with=_LONGER, in_megatron=False
    )
    """Multiply queries by 1 + this x ln(1 + floor(position / --original-max-position-embeddings)), as in
    Ministral 3."""
    no_rope_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, **_ROPE)
    """Layers without rotary positions: every Nth. Or a list with 1 for each layer without them and 0 for each
    other layer."""

    conflicts: ClassVar[Conflicts] = {
        **require_both("yarn_mscale", "yarn_mscale_all_dim"),
        Setting("rotary_percent", other_than(1.0)): {
            "multi_latent_attention": ": pass --qk-pos-emb-head-dim instead",
        },
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("rope_low_freq_factor", "rope_high_freq_factor", ": change one of them", is_strict=True),
        Bound("yarn_beta_slow", "yarn_beta_fast", ": change one of them"),
    )


@dataclass(frozen=True)
class RotarySpec:
    """Rotation of queries and keys by their position (rope).

    Attributes:
        size: number of rotated elements of a head, r.
        base: base of the frequencies.
        scaling: --rope-scaling of the frequencies.
    """

    size: int
    base: float
    scaling: str
