"""Recurrent mixers: their options, and their specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megalite.config.model.transformer import IS_BERT
from megalite.config.option import NOT_NEGATIVE, POSITIVE, SIZE, Conflicts, Range, Setting, option, other_than

RecurrentMixer = Literal["none", "gated_delta_net", "kimi_delta_attention", "gated_convolution"]

_PATTERN = Range(
    lambda pattern: set(pattern) <= set("M*B-E"),
    "M (Mamba-2), * (attention), B (both), - (MLP) and E (experts)",
    "has other letters: its letters are",
)
HAS_RECURRENT_MIXER = Setting("recurrent_mixer", other_than("none"))
_RECURRENT: dict[str, Any] = {"only_with": HAS_RECURRENT_MIXER}
_DELTA_NET: dict[str, Any] = {
    "allowed": SIZE,
    "only_with": Setting("recurrent_mixer", ("gated_delta_net",)),
}
_KEY_HEADS: dict[str, Any] = {
    "allowed": SIZE,
    "only_with": Setting("recurrent_mixer", ("gated_delta_net", "kimi_delta_attention")),
}
HAS_MAMBA = Setting(
    "hybrid_override_pattern",
    Range(lambda pattern: not {"M", "B"}.isdisjoint(str(pattern)), "with M or B"),
    "no layer has Mamba-2 (M or B in --hybrid-override-pattern)",
)
_HAS_BOTH = Setting(
    "hybrid_override_pattern",
    Range(lambda pattern: "B" in str(pattern), "with B"),
    "no layer has both mixers (B in --hybrid-override-pattern)",
)
MambaNorm = Literal["after_gate", "before_gate", "none"]
_MAMBA: dict[str, Any] = {"allowed": SIZE, "only_with": HAS_MAMBA, "in_megatron": False}


@dataclass(frozen=True)
class RecurrentOptions:
    """Options of the mixers that stand in for attention, and of Mamba-2."""

    section: ClassVar[str] = "recurrence"

    recurrent_mixer: RecurrentMixer = option("none", "--experimental-attention-variant", in_megatron=False)
    """Replace attention in some layers by what costs a token the same in any sample: gated_delta_net,
    kimi_delta_attention (Kimi Linear) or gated_convolution (LFM2)."""
    linear_attention_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, **_RECURRENT)
    """Layers with attention: every Nth. Or a list with 1 for each layer with --recurrent-mixer and 0 for each
    layer with attention. By default no layer has attention."""
    linear_conv_kernel_dim: int = option(4, allowed=SIZE, **_RECURRENT)
    """Tokens that the convolution of --recurrent-mixer sees: a token and those before it."""
    linear_key_head_dim: int = option(128, **_KEY_HEADS)
    """Size of a query or key head of Gated DeltaNet, or of any head of Kimi Delta Attention."""
    linear_value_head_dim: int = option(128, **_DELTA_NET)
    """Size of a value head of Gated DeltaNet."""
    linear_num_key_heads: int = option(16, **_KEY_HEADS)
    """Number of query and of key heads of Gated DeltaNet, or of heads of Kimi Delta Attention."""
    linear_num_value_heads: int = option(32, **_DELTA_NET)
    """Number of value heads of Gated DeltaNet, a multiple of its key heads."""
    linear_allow_neg_eigval: bool = option(
        False, **{**_DELTA_NET, "allowed": None}, same_shapes=True, in_megatron=False
    )
    """Double the rates with which Gated DeltaNet writes, up to 2: a state can then change its sign (OLMo
    Hybrid)."""
    linear_norm_epsilon: float | None = option(
        None, **{**_DELTA_NET, "allowed": POSITIVE}, same_shapes=True, in_megatron=False
    )
    """Epsilon of the norm of the output of Gated DeltaNet. By default --layernorm-epsilon."""
    linear_pre_norm: bool = option(
        False,
        same_shapes=True,
        in_megatron=False,
        only_with=(HAS_RECURRENT_MIXER, Setting("norm_position", ("output", "sandwich"))),
    )
    """Normalize the input of each block in layers with --recurrent-mixer, whatever --norm-position says (OLMo
    Hybrid)."""
    hybrid_override_pattern: str | None = option(
        None, "--hybrid-layer-pattern", allowed=_PATTERN, in_megatron=False
    )
    """One block for each layer: M is Mamba-2, * attention, B both side by side, - an MLP, E experts
    (docs/hybrid.md)."""
    mamba_num_heads: int | None = option(None, **_MAMBA)
    """Number of heads of Mamba-2. By default twice the hidden size in all, divided by --mamba-head-dim."""
    mamba_head_dim: int = option(64, **_MAMBA)
    """Size of a head of Mamba-2."""
    mamba_num_groups: int = option(8, **_MAMBA)
    """Number of groups of heads of Mamba-2 that share B and C; --tp must divide it."""
    mamba_state_dim: int = option(128, **_MAMBA)
    """Size of the state of each element of a head of Mamba-2."""
    mamba_conv_kernel: int = option(4, **_MAMBA)
    """Tokens that the convolution of Mamba-2 sees: a token and those before it."""
    mamba_bias: bool = option(
        False,
        only_with=(HAS_MAMBA, Setting("add_bias_linear", (False,))),
        in_megatron=False,
    )
    """Add a bias to the projections of Mamba-2 even with --disable-bias-linear."""
    mamba_min_time_step: float = option(0.0, **{**_MAMBA, "allowed": NOT_NEGATIVE})
    """Smallest time step of Mamba-2; transformers' Nemotron-H has 0.001."""
    mamba_norm: MambaNorm = option("after_gate", only_with=HAS_MAMBA, in_megatron=False)
    """Normalize the output of Mamba-2 over each group after it is multiplied by its gate, before that, or not
    at all (none: Falcon-H1)."""
    mamba_multipliers: tuple[float, ...] | None = option(
        None, allowed=POSITIVE, same_shapes=True, only_with=HAS_MAMBA, in_megatron=False
    )
    """Five factors of what the input projection of Mamba-2 computes: gates, inputs, B, C, and time steps
    (Falcon-H1)."""
    mixer_multipliers: tuple[float, ...] | None = option(
        None, allowed=POSITIVE, same_shapes=True, only_with=_HAS_BOTH, in_megatron=False
    )
    """Two factors, of the outputs of attention and of Mamba-2 in layers that have both (Falcon-H1)."""

    conflicts: ClassVar[Conflicts] = {
        "mup_base_width": {
            (HAS_RECURRENT_MIXER, HAS_MAMBA): ": muP has no rule for recurrent layers; remove it"
        },
        ("linear_attention_freq", "moe_layer_freq", "no_rope_freq", "window_size", HAS_RECURRENT_MIXER): {
            "hybrid_override_pattern": ", which names each layer: remove one",
        },
        ("parallel_residual", Setting("norm_position", other_than("pre"))): {
            "hybrid_override_pattern": ", whose layers have one block with a norm before it: remove it",
        },
        "linear_pre_norm": {
            Setting("norm_position", ("post",)): ": then no norm follows the last layer; pass another one",
        },
        HAS_RECURRENT_MIXER: {IS_BERT: ", whose tokens also see later ones: remove it"},
        "hybrid_override_pattern": {IS_BERT: ", whose layers have two blocks: remove it"},
    }

    @property
    def delta_net(self) -> DeltaNetSpec:
        """Return Gated DeltaNet, which --recurrent-mixer gives to layers."""
        return DeltaNetSpec(
            self.linear_conv_kernel_dim,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_num_key_heads,
            self.linear_num_value_heads,
        )


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet; several value heads can share a query and key head.

    Attributes:
        kernel: tokens that the convolution sees.
        key_dim, value_dim: size of a query or key head, and of a value head.
        key_heads, value_heads: numbers of heads.
    """

    name: ClassVar[str] = "gated_delta_net"
    cut_by: ClassVar[str] = "linear_num_key_heads"
    """Field of the number of parts that tensor- and context-parallel ranks divide among them."""
    part: ClassVar[str] = "key heads with their value heads"
    kernel: int
    key_dim: int
    value_dim: int
    key_heads: int
    value_heads: int

    @property
    def num_parts(self) -> int:
        """Return the number of parts that ranks divide among them."""
        return self.key_heads

    @property
    def kernel_sizes(self) -> tuple[int, int]:
        """Return the sizes of a state, which bound what a kernel of the recurrence can hold."""
        return self.key_dim, self.value_dim

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
class KimiDeltaSpec:
    """Kimi Delta Attention; each element of a key has a decay of its own.

    Attributes:
        kernel: tokens that the convolution sees.
        head_dim: size of a head of queries, keys and values.
        num_heads: number of heads.
    """

    name: ClassVar[str] = "kimi_delta_attention"
    cut_by: ClassVar[str] = "linear_num_key_heads"
    part: ClassVar[str] = "heads"
    kernel_sizes: ClassVar[tuple[int, ...]] = ()
    """No kernel has a decay for each element of a key."""
    kernel: int
    head_dim: int
    num_heads: int

    @property
    def num_parts(self) -> int:
        """Return the number of parts that ranks divide among them."""
        return self.num_heads

    @property
    def width(self) -> int:
        """Return the number of features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Return the features that the input projection computes for a head: query, key, value and rate."""
        return (self.head_dim, self.head_dim, self.head_dim, 1)

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices of all projections."""
        narrow = 2 * self.head_dim * (hidden_size + self.width)  # of decays and gates
        return hidden_size * (self.num_heads * sum(self.group_rows) + self.width) + narrow

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the recurrence and the convolution per token; see `DeltaNetSpec`."""
        return 3 * self.width * (self.head_dim + self.kernel)


@dataclass(frozen=True)
class GatedConvolutionSpec:
    """Short convolution of each channel, with a gate before and one after it; it keeps no state.

    Attributes:
        kernel: tokens that the convolution sees.
        width: number of channels.
    """

    name: ClassVar[str] = "gated_convolution"
    cut_by: ClassVar[str] = "hidden_size"
    part: ClassVar[str] = "channels"
    kernel_sizes: ClassVar[tuple[int, ...]] = ()
    """No kernel of a recurrence runs."""
    group_rows: ClassVar[tuple[int, ...]] = (1, 1, 1)
    """Features that the input projection computes for a channel: two gates, and what they multiply."""
    kernel: int
    width: int

    @property
    def num_parts(self) -> int:
        """Return the number of parts that ranks divide among them."""
        return self.width

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices of both projections."""
        return hidden_size * 4 * self.width

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the convolution per token."""
        return self.kernel * self.width


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
    cut_by: ClassVar[str] = "mamba_num_groups"
    part: ClassVar[str] = "groups with their heads"
    state_dim: int
    head_dim: int
    num_groups: int
    num_heads: int
    kernel: int
    min_time_step: float

    @property
    def num_parts(self) -> int:
        """Return the number of parts that ranks divide among them."""
        return self.num_groups

    @property
    def kernel_sizes(self) -> tuple[int, int]:
        """Return the sizes of a state, which bound what a kernel of the recurrence can hold."""
        return self.state_dim, self.head_dim

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
