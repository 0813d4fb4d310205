"""What each layer of a model is made of, computed from the flat options of `ModelConfig`.

Only this file knows the options that choose among layers, such as --window-attn-skip-freq. Modules, rules and
the planner read the specs. In each function, `model` is a `ModelConfig`, whose file imports this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megalite.config.model.attention import AttentionSpec, LatentSpec, RotarySpec
from megalite.config.model.feed_forward import ExpertsSpec
from megalite.config.model.recurrence import DeltaNetSpec, GatedConvolutionSpec, KimiDeltaSpec, MambaSpec
from megalite.config.model.transformer import NormPosition

RecurrentSpec = DeltaNetSpec | KimiDeltaSpec | GatedConvolutionSpec | MambaSpec


@dataclass(frozen=True)
class ParallelMixersSpec:
    """Attention and Mamba-2 that read the same input, and whose outputs are added."""

    name: ClassVar[str] = "mixers"
    attention: AttentionSpec
    mamba: MambaSpec

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices."""
        return self.attention.num_weights(hidden_size) + self.mamba.num_weights(hidden_size)


MixerSpec = AttentionSpec | RecurrentSpec | ParallelMixersSpec


@dataclass(frozen=True)
class LayerSpec:
    """Blocks of a layer; a layer has at least one.

    Attributes:
        mixer: what lets a token see earlier ones.
        ffn_size: width of the MLP; None without one.
        experts: mixture of experts, in the place of an MLP or beside it; None without one.
        norm_position: what the layer normalizes; see `NORMALIZED`.
    """

    mixer: MixerSpec | None
    ffn_size: int | None
    experts: ExpertsSpec | None = None
    norm_position: NormPosition = "pre"

    @property
    def attention(self) -> AttentionSpec | None:
        """Return the mixer if it is attention, or the attention beside another one."""
        mixer = self.mixer.attention if isinstance(self.mixer, ParallelMixersSpec) else self.mixer
        return mixer if isinstance(mixer, AttentionSpec) else None

    @property
    def recurrence(self) -> RecurrentSpec | None:
        """Return the mixer if it is recurrent, or the recurrent one beside attention."""
        mixer = self.mixer.mamba if isinstance(self.mixer, ParallelMixersSpec) else self.mixer
        return mixer if isinstance(mixer, RecurrentSpec) else None

    @property
    def has_mlp(self) -> bool:
        """Return whether the layer has an MLP, or experts in its place."""
        return self.ffn_size is not None or self.experts is not None

    def given_elements(self, tp: int) -> int:
        """Return how many elements of a token a rank's layer gives later ones, besides hidden states."""
        spec = self.attention
        if spec is None or not spec.gives_keys:
            return 0
        return 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim


_RECURRENT_MIXERS: Mapping[str, Callable[[Any], RecurrentSpec]] = {
    "gated_delta_net": lambda model: model.delta_net,
    "kimi_delta_attention": lambda model: KimiDeltaSpec(
        model.linear_conv_kernel_dim, model.linear_key_head_dim, model.linear_num_key_heads
    ),
    "gated_convolution": lambda model: GatedConvolutionSpec(model.linear_conv_kernel_dim, model.hidden_size),
}
"""Specs by --recurrent-mixer."""


def layer_spec(model: Any, number: int) -> LayerSpec:
    """Return a layer by its number in the whole model.

    Modules of multi-token prediction have the numbers after it, and are like the last layer.
    """
    number = min(number, model.num_layers - 1)
    ffn_size = model.ffn_size
    match (model.hybrid_override_pattern or "")[number : number + 1]:
        case "M":
            return LayerSpec(model.mamba, None)
        case "B":
            return LayerSpec(ParallelMixersSpec(attention_spec(model, number), model.mamba), None)
        case "-":
            return LayerSpec(None, ffn_size)
        case "E":
            return LayerSpec(None, None, model.experts)
        case "*":
            return LayerSpec(attention_spec(model, number), None)
    experts = model.experts if _has_experts(model, number) else None
    is_recurrent = model.recurrent_mixer != "none" and _is_recurrent(model, number)
    mixer = _RECURRENT_MIXERS[model.recurrent_mixer](model) if is_recurrent else attention_spec(model, number)
    if isinstance(mixer, AttentionSpec) and mixer.key_source is not None:
        ffn_size = model.kv_shared_ffn_hidden_size or ffn_size
    has_mlp = experts is None or model.moe_beside_mlp
    norm_position: NormPosition = "pre" if is_recurrent and model.linear_pre_norm else model.norm_position
    return LayerSpec(mixer, ffn_size if has_mlp else None, experts, norm_position)


def attention_spec(model: Any, number: int) -> AttentionSpec:
    """Return attention of a layer by its number in the whole model, if the layer has attention."""
    window, is_rotated = _window_and_rotation(model, number)
    if model.multi_latent_attention:
        spec: AttentionSpec = LatentSpec(
            model.num_attention_heads,
            model.num_kv_heads,
            model.head_dim,
            model.v_head_dim,
            _score_scale(model, model.head_dim),
            window,
            query_width=model.q_lora_rank,
            latent_width=model.kv_lora_rank,
            key_dim=model.qk_head_dim,
        )
    else:
        is_full = window is None
        head_dim = (model.full_attention_kv_channels if is_full else None) or model.head_dim
        groups = (model.full_attention_query_groups if is_full else None) or model.num_kv_heads
        scale = _score_scale(model, head_dim)
        spec = AttentionSpec(model.num_attention_heads, groups, head_dim, head_dim, scale, window)
    source, gives_keys = _shared_keys(model, number)
    as_values = model.keys_as_values == "all" or (model.keys_as_values == "full_attention" and window is None)
    return replace(
        spec,
        rotary=_rotary(model, spec) if is_rotated else None,
        has_gate=model.attention_output_gate,
        keys_as_values=as_values and source is None,
        key_source=source,
        gives_keys=gives_keys,
    )


def _score_scale(model: Any, head_dim: int) -> float:
    """Return the factor of the products of queries and keys of this size."""
    divisor = model.squared_score_divisor(head_dim)
    scale = 1.0 / math.sqrt(divisor) if divisor else math.inf  # a rule refuses heads of no elements
    if model.multi_latent_attention and model.rope_scaling == "yarn" and model.yarn_mscale_all_dim:
        longer = max(model.rope_scaling_factor, 1.0)
        scale *= (0.1 * model.yarn_mscale_all_dim * math.log(longer) + 1.0) ** 2
    return scale


def _rotary(model: Any, spec: AttentionSpec) -> RotarySpec:
    size = int(spec.head_dim * model.rotary_percent)
    if isinstance(spec, LatentSpec):
        size = model.qk_pos_emb_head_dim
    if spec.window is None:
        return RotarySpec(size, model.rotary_base, model.rope_scaling)
    scaling = model.rope_scaling if model.window_rope_scaling else "none"
    return RotarySpec(size, model.window_rotary_base or model.rotary_base, scaling)


def layer_lines(model: Any) -> list[str]:
    """Return a line for all equal layers: `layers 0-3, 5: attention (4 heads of 16), MLP of 64`."""
    numbers: dict[str, list[range]] = {}
    for number, spec in enumerate(model.layer_specs):
        runs = numbers.setdefault(_text(spec, model), [])
        first = runs.pop().start if runs and runs[-1].stop == number else number
        runs.append(range(first, number + 1))
    return [f"layers {', '.join(map(_range_text, runs))}: {text}" for text, runs in numbers.items()]


def _range_text(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers[-1]}"


def _text(spec: LayerSpec, model: Any) -> str:
    blocks = []
    if spec.recurrence is not None:
        sizes = ", ".join(f"{name} {size}" for name, size in vars(spec.recurrence).items())
        blocks.append(f"{spec.recurrence.name} ({sizes})")
    if (attention := spec.attention) is not None:
        parts = [f"{attention.num_heads} heads of {attention.head_dim}"]
        if attention.key_source is not None:
            parts.append(f"keys and values of layer {attention.key_source}")
        elif attention.num_kv_heads != attention.num_heads:
            parts.append(f"{attention.num_kv_heads} of keys and values")
        if attention.keys_as_values:
            parts.append("keys as values")
        if attention.window is not None:
            parts.append(f"window {attention.window}")
        if attention.rotary is not None:
            parts.append(f"rope of {attention.rotary.size} elements, base {attention.rotary.base:g}")
        if isinstance(attention, LatentSpec):
            parts.append(f"keys and values from latents of {attention.latent_width}")
        blocks.append(f"attention ({', '.join(parts)})")
    if spec.ffn_size is not None:
        blocks.append(f"MLP of {spec.ffn_size}")
    if (experts := spec.experts) is not None:
        blocks.append(f"{experts.count} experts of {experts.width}, {experts.top_k} a token")
        blocks += [] if experts.shared_width is None else [f"a shared expert of {experts.shared_width}"]
    return ", ".join(blocks)


def windows_differ(model: Any) -> bool:
    """Return whether layers with a window differ from the others in more than what a query sees."""
    one_each: dict[str, Any] = {"num_layers": 2, "window_size": (1, 0), "window_attn_skip_freq": (1, 0)}
    two = replace(model, **one_each, no_rope_freq=None, num_kv_shared_layers=0)
    window, full = (replace(attention_spec(two, number), window=None) for number in range(2))
    return window != full


def _is_recurrent(model: Any, number: int) -> bool:
    """Return whether a layer has the recurrent mixer, in a model with one."""
    pattern = model.linear_attention_freq
    return pattern is None or _is_marked(pattern, number, every_nth=0)


def _window_and_rotation(model: Any, number: int) -> tuple[int | None, bool]:
    """Return a layer's window, and whether it rotates queries and keys."""
    window, skipped, unrotated = model.window_size, model.window_attn_skip_freq, model.no_rope_freq
    if window is not None and skipped is not None and not _is_marked(skipped, number, every_nth=0):
        window = None
    is_rotated = model.position_embedding_type == "rope" and (
        unrotated is None or not _is_marked(unrotated, number, every_nth=1)
    )
    return None if window is None else window[0], is_rotated


def _shared_keys(model: Any, number: int) -> tuple[int | None, bool]:
    """Return the layer whose keys and values a layer attends to, and whether it gives its own to others.

    Layers share keys and values with layers of the same window and rotation only.
    """
    first = model.num_layers - model.num_kv_shared_layers  # that shares
    if first == model.num_layers:
        return None, False
    own = _window_and_rotation(model, number)
    before = (i for i in reversed(range(first)) if _window_and_rotation(model, i) == own)
    last = next(before, None)  # of the layers with keys of their own
    return (last, False) if number >= first else (None, last == number)


def _has_experts(model: Any, number: int) -> bool:
    """Return whether a layer has a mixture of experts."""
    pattern = model.moe_layer_freq or (1,)
    if not model.has_experts:
        return False
    if len(pattern) > 1:
        return _is_one(pattern, number)
    return pattern[0] > 0 and number % pattern[0] == 0


def _is_marked(pattern: tuple[int, ...], number: int, every_nth: int) -> bool:
    """Return whether a pattern of layers marks a layer with 1.

    Args:
        pattern: a number for each layer, or a single number N.
        every_nth: mark of every Nth layer of a single number; the other layers have the other mark.
    """
    if len(pattern) > 1:
        return _is_one(pattern, number)
    is_nth = pattern[0] > 0 and (number + 1) % pattern[0] == 0
    return is_nth == (every_nth == 1)


def _is_one(pattern: tuple[int, ...], number: int) -> bool:
    """Return whether the pattern has a 1 for a layer; False beyond its end, which a rule refuses."""
    return number < len(pattern) and pattern[number] == 1
