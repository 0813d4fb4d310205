"""What each layer of a model is made of, computed from the flat options of `ModelConfig`.

Only this file knows the options that choose among layers, such as --window-attn-skip-freq. Modules, rules and
the planner read the specs. In each function, `model` is a `ModelConfig`, whose file imports this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar


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


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention.

    Attributes:
        num_heads: query heads, n.
        num_kv_heads: key/value heads, g.
        head_dim: size of a head of queries and keys, d.
        value_dim: size of a head of values.
        score_scale: factor of the products of queries and keys.
        window: largest number of keys before its own that a query attends to; None without this limit.
        rotary: rotation of queries and keys; None without.
        has_gate: whether the query projection also computes gates of the heads' outputs.
        keys_as_values: whether the values are the keys before their norm and rotation.
        key_source: number of the earlier layer whose keys and values the layer attends to; None for its own.
        gives_keys: whether later layers attend to the layer's keys and values.
    """

    name: ClassVar[str] = "attention"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    score_scale: float
    window: int | None = None
    rotary: RotarySpec | None = None
    has_gate: bool = False
    keys_as_values: bool = False
    key_source: int | None = None
    gives_keys: bool = False

    @property
    def num_groups(self) -> int:
        """Return by how many groups of heads the query/key/value projection is ordered.

        It is one for each key/value head. Without keys, it is one for each query head.
        """
        return self.num_kv_heads if self.key_source is None else self.num_heads

    @property
    def group_heads(self) -> tuple[int, ...]:
        """Return how many heads of each sort a group has in the query/key/value projection.

        The sorts are queries, their gates if there are gates, and, unless the layer attends to keys of an
        earlier one, one key, and one value unless it is the key.
        """
        queries = self.num_heads // self.num_groups
        gates = (queries,) if self.has_gate else ()
        keys = (1,) if self.key_source is None else ()
        values = () if self.keys_as_values else keys
        return queries, *gates, *keys, *values

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices."""
        heads = self.num_groups * sum(self.group_heads) + self.num_heads
        return hidden_size * heads * self.head_dim


@dataclass(frozen=True)
class LatentSpec(AttentionSpec):
    """Multi-latent attention, whose heads' keys have a part of their own and a rotated part that all share.

    Attributes:
        query_width: width of the latent of queries; None if these are projected from the hidden states.
        latent_width: width of the latent of keys and values.
        key_dim: elements of a head's queries and keys without rotation; the other `rotary.size` are rotated.
    """

    query_width: int | None = None
    latent_width: int = 0
    key_dim: int = 0

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices."""
        queries, values = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        from_latents = self.num_heads * (self.key_dim + self.value_dim) * self.latent_width
        rows = self.latent_width + self.head_dim - self.key_dim + values
        if self.query_width is None:
            return from_latents + hidden_size * (rows + queries)
        return from_latents + self.query_width * queries + hidden_size * (rows + self.query_width)


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet; several value heads can share a query and key head.

    Attributes:
        kernel: tokens that the convolution sees.
        key_dim, value_dim: size of a query or key head, and of a value head.
        key_heads, value_heads: numbers of heads.
    """

    name: ClassVar[str] = "gated_delta_net"
    kernel: int
    key_dim: int
    value_dim: int
    key_heads: int
    value_heads: int

    @property
    def sharers(self) -> int:
        """Return the number of value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Return the features that the input projection computes for one key head, by kind.

        The kinds are query, key, values, the gates of the output, and each value head's rate and decay.
        """
        values = self.sharers * self.value_dim
        return (self.key_dim, self.key_dim, values, values, self.sharers, self.sharers)

    @property
    def num_mixed(self) -> int:
        """Return the features of one key head that the convolution mixes: query, key and values."""
        return sum(self.group_rows[:3])

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices of both projections."""
        return hidden_size * (self.key_heads * sum(self.group_rows) + self.value_heads * self.value_dim)

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the recurrence and the convolution per token.

        The recurrence reads the state with a key, adds an outer product to it, and reads it with a query.
        """
        return 3 * self.value_heads * self.key_dim * self.value_dim + (
            self.kernel * self.key_heads * self.num_mixed
        )


@dataclass(frozen=True)
class MambaSpec:
    """Mamba-2; the heads of a group share what writes to their states and reads them.

    Attributes:
        state_dim: n, size of the state of each element of a head.
        head_dim: p, size of a head.
        num_groups, num_heads: numbers of groups and heads.
        kernel: tokens that the convolution before the recurrence sees.
        min_time_step: smallest time step.
    """

    name: ClassVar[str] = "mamba"
    state_dim: int
    head_dim: int
    num_groups: int
    num_heads: int
    kernel: int
    min_time_step: float

    @property
    def group_heads(self) -> int:
        """Return the number of heads of a group."""
        return self.num_heads // self.num_groups

    @property
    def width(self) -> int:
        """Return the number of features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Return the features that the input projection computes for a group, by kind.

        The kinds are the gates of the output, the inputs x of the heads, B, C, and each head's time step.
        """
        heads = self.group_heads * self.head_dim
        return (heads, heads, self.state_dim, self.state_dim, self.group_heads)

    @property
    def num_mixed(self) -> int:
        """Return the features of a group that the convolution mixes: x, B and C."""
        return sum(self.group_rows[1:4])

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices of both projections."""
        return hidden_size * (self.num_groups * sum(self.group_rows) + self.width)

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the recurrence and the convolution per token.

        The recurrence adds an outer product to the state, and reads the state.
        """
        return 2 * self.width * self.state_dim + self.kernel * self.num_groups * self.num_mixed


HYBRID_LETTERS = "M*-E"
"""Letters of --hybrid-override-pattern: Mamba-2, attention, an MLP, experts."""
RecurrentSpec = DeltaNetSpec | MambaSpec
MixerSpec = AttentionSpec | RecurrentSpec


@dataclass(frozen=True)
class LayerSpec:
    """Blocks of a layer; a layer has at least one.

    Attributes:
        mixer: what lets a token see earlier ones.
        ffn_size: width of the MLP; None without one.
        has_experts: whether it has a mixture of experts, in the place of an MLP or beside it.
    """

    mixer: MixerSpec | None
    ffn_size: int | None
    has_experts: bool = False

    @property
    def attention(self) -> AttentionSpec | None:
        """Return the mixer if it is attention."""
        return self.mixer if isinstance(self.mixer, AttentionSpec) else None

    @property
    def recurrence(self) -> RecurrentSpec | None:
        """Return the mixer if it is recurrent."""
        return self.mixer if isinstance(self.mixer, (DeltaNetSpec, MambaSpec)) else None

    @property
    def has_mlp(self) -> bool:
        """Return whether the layer has an MLP, or experts in its place."""
        return self.ffn_size is not None or self.has_experts


def layer_spec(model: Any, number: int) -> LayerSpec:
    """Return a layer by its number in the whole model.

    Modules of multi-token prediction have the numbers after it, and are like the last layer.
    """
    number = min(number, model.num_layers - 1)
    ffn_size = model.ffn_size
    if model.hybrid_override_pattern is not None:
        attention = LayerSpec(attention_spec(model, number), None)
        return {
            "M": LayerSpec(model.mamba, None),
            "*": attention,
            "-": LayerSpec(None, ffn_size),
            "E": LayerSpec(None, None, has_experts=True),
        }.get(model.hybrid_override_pattern[number : number + 1], attention)
    has_experts = _has_experts(model, number)
    is_recurrent = model.recurrent_mixer != "none" and _is_recurrent(model, number)
    mixer = model.delta_net if is_recurrent else attention_spec(model, number)
    if isinstance(mixer, AttentionSpec) and mixer.key_source is not None:
        ffn_size = model.kv_shared_ffn_hidden_size or ffn_size
    return LayerSpec(mixer, None if has_experts and not model.moe_beside_mlp else ffn_size, has_experts)


def attention_spec(model: Any, number: int) -> AttentionSpec:
    """Return attention of a layer by its number in the whole model, if the layer has attention."""
    window, is_rotated = _window_and_rotation(model, number)
    if model.multi_latent_attention:
        spec: AttentionSpec = LatentSpec(
            model.num_attention_heads,
            model.num_kv_heads,
            model.head_dim,
            model.v_head_dim,
            score_scale(model, model.head_dim),
            window,
            query_width=model.q_lora_rank,
            latent_width=model.kv_lora_rank,
            key_dim=model.qk_head_dim,
        )
    else:
        is_full = window is None
        head_dim = (model.full_attention_kv_channels if is_full else None) or model.head_dim
        groups = (model.full_attention_query_groups if is_full else None) or model.num_kv_heads
        scale = score_scale(model, head_dim)
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


def score_scale(model: Any, head_dim: int) -> float:
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


def windows_differ(model: Any) -> bool:
    """Return whether layers with a window differ from the others in more than what a query sees."""
    two = replace(
        model, num_layers=2, window_attn_skip_freq=(1, 0), no_rope_freq=None, num_kv_shared_layers=0
    )
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
