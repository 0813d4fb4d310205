"""Attention and rotary position embedding: their options, and the specs of a layer of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from megalite.config.model.recurrence import HAS_RECURRENT_MIXER
from megalite.config.model.transformer import IS_BERT
from megalite.config.option import (
    FRACTION,
    NONZERO_SHARE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SIZE,
    Bound,
    Conflicts,
    OnResume,
    Range,
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
    """Factor by which the samples may be longer."""
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


KeysAsValues = Literal["none", "full_attention", "all"]
QKNormWidth = Literal["head", "all_heads"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
AttentionBackend = Literal[
    "auto", "flash", "cudnn", "efficient", "flex", "fused", "triton", "unfused", "local"
]

_FULL_ATTENTION: dict[str, Any] = {"allowed": SIZE, "in_megatron": False}
_PAIRS = Range(lambda size: 0 < size < 2**31 and size % 2 == 0, "even, greater than 0 and below 2**31")
_AS_VALUES = Setting("keys_as_values", other_than("none"))
_LATENTS = Setting("multi_latent_attention")
_LATENT: dict[str, Any] = {"only_with": "multi_latent_attention"}


class KernelFeature(NamedTuple):
    """Option of attention that not all kernels compute.

    Attributes:
        setting: the option, and its values.
        backends: values of --attention-backend that compute it.
        lack: what the others lack, as a clause.
        without: what to do instead, after "pass --attention-backend auto, or".
        is_merged: whether a merge of blocks of keys adds it to the results of any kernel.
    """

    setting: Setting
    backends: tuple[AttentionBackend, ...]
    lack: str
    without: str
    is_merged: bool = False


KERNEL_FEATURES = (
    KernelFeature(
        Setting("attention_dropout"),
        ("triton", "unfused", "local"),
        "has no dropout that is the same in any layout",
        "--attention-dropout 0",
    ),
    KernelFeature(
        Setting("attn_logit_softcapping"),
        ("triton", "unfused", "local", "flex"),
        "cannot cap scores",
        "remove --attn-logit-softcapping",
    ),
    KernelFeature(
        Setting("softmax_type", other_than("vanilla")),
        ("triton", "unfused", "local", "flex"),
        "has no sinks in its softmax",
        "--softmax-type vanilla",
        is_merged=True,
    ),
    KernelFeature(
        Setting("qk_clip"), ("unfused", "local"), "does not return the largest scores", "remove --qk-clip"
    ),
)


@dataclass(frozen=True)
class AttentionOptions:
    """Options of attention."""

    section: ClassVar[str] = "attention"

    num_attention_heads: int = option(12, allowed=SIZE)
    """Number of attention (query) heads."""
    num_query_groups: int | None = option(None, "--num-key-value-heads", allowed=SIZE)
    """Number of key/value heads (grouped-query attention). By default one for each query head."""
    kv_channels: int | None = option(
        None, allowed=SIZE, only_with=Setting("multi_latent_attention", (False,))
    )
    """Size of one attention head. By default hidden size / attention heads."""
    full_attention_kv_channels: int | None = option(None, **_FULL_ATTENTION)
    """Size of one attention head in layers without a window (Gemma 4). By default --kv-channels."""
    full_attention_query_groups: int | None = option(None, **_FULL_ATTENTION)
    """Number of key/value heads in layers without a window (Gemma 4). By default --num-query-groups."""
    keys_as_values: KeysAsValues = option("none", in_megatron=False)
    """Layers whose values are the keys before norm and rotation, without a projection of their own: none,
    those without a window (full_attention: Gemma 4), or all."""
    num_kv_shared_layers: int = option(0, allowed=NOT_NEGATIVE, in_megatron=False)
    """The last layers, this many, attend to keys and values of the last layer before them with the same
    window and rotation (Gemma 4)."""
    window_size: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, same_shapes=True)
    """Sliding-window attention, W,0: a token attends to itself and at most W tokens before it, and to none
    after it. By default to all tokens before it."""
    window_attn_skip_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, same_shapes=True)
    """Layers without the window: every Nth. Or a list with 1 for each layer with the window and 0 for each
    other layer, such as [1]*3+[0]. By default all layers have it."""
    softmax_type: SoftmaxType = option("vanilla", same_shapes=("vanilla", "off-by-one"))
    """What attention's softmax adds to its sum over keys: nothing (vanilla), 1 (off-by-one), or exp of a
    learned logit per query head (learnable: the sinks of GPT-OSS)."""
    attention_output_gate: bool = False
    """Multiply each head's output by the sigmoid of a gate, which the query projection also computes
    (Qwen3-Next)."""
    clip_qkv: float | None = option(None, allowed=POSITIVE, same_shapes=True, in_megatron=False)
    """Bound queries, keys and values before rotary positions, after their norms (OLMoE)."""
    qk_layernorm: bool = False
    """Normalize queries and keys before attention, with the norm of --normalization. In multi-latent
    attention, normalize the latents."""
    qk_layernorm_width: QKNormWidth = option("head", only_with="qk_layernorm", in_megatron=False)
    """Normalize each head's queries and keys, with one weight for all heads (Qwen 3), or all heads together
    (all_heads: OLMo 2)."""
    qk_layernorm_after_rope: bool = option(
        False,
        only_with=(Setting("qk_layernorm"), Setting("position_embedding_type", ("rope",))),
        in_megatron=False,
    )
    """Normalize queries and keys after their rotation, instead of before it (Hunyuan)."""
    value_layernorm: bool = option(False, in_megatron=False)
    """Normalize each head's values by an RMSNorm without a weight (Gemma 4)."""
    query_pre_attn_scalar: float | None = option(None, allowed=POSITIVE, same_shapes=True, in_megatron=False)
    """Divide attention scores by the square root of this. By default of the head size."""
    attn_logit_softcapping: float | None = option(None, allowed=POSITIVE, same_shapes=True, in_megatron=False)
    """Replace each scaled attention score x by C tanh(x / C), as in Gemma 2."""
    qk_clip: bool = option(False, on_resume=OnResume.SETTING)
    """After each update, scale down the queries and keys of heads whose largest attention score was above
    --qk-clip-threshold."""
    qk_clip_threshold: float = option(
        100.0, allowed=POSITIVE, on_resume=OnResume.SETTING, only_with="qk_clip"
    )
    """Largest attention score, after scaling, that --qk-clip leaves."""
    qk_clip_alpha: float = option(0.5, allowed=SHARE, on_resume=OnResume.SETTING, only_with="qk_clip")
    """Power of the factor by which --qk-clip scales queries; keys get the rest, 1 minus this."""
    add_qkv_bias: bool = option(False, only_with=Setting("add_bias_linear", (False,)))
    """Add a bias to the queries, keys and values even with --disable-bias-linear, as Qwen 2 does. In
    multi-latent attention, add it to the projections to latents."""
    add_attention_output_bias: bool = option(
        False, only_with=Setting("add_bias_linear", (False,)), in_megatron=False
    )
    """Add a bias to the output of attention even with --disable-bias-linear. With --add-qkv-bias, it is
    transformers' attention_bias."""
    attention_dropout: float = option(0.1, allowed=FRACTION, on_resume=OnResume.SETTING)
    """Dropout probability of the attention weights."""
    attention_backend: AttentionBackend = option("auto", on_resume=OnResume.FREE, in_megatron=False)
    """Kernel that computes attention. fused: any of flash, cudnn and efficient. Attention dropout needs
    triton (CUDA GPUs), unfused or local (docs/attention.md)."""

    conflicts: ClassVar[Conflicts] = {
        **{
            setting: {
                Setting("attention_backend", other_than("auto", *backends)): (
                    f", which {lack}: pass --attention-backend auto, or {without}"
                )
            }
            for setting, backends, lack, without, _ in KERNEL_FEATURES
        },
        Setting("qk_layernorm_width", ("all_heads",)): {
            Setting("normalization", other_than("RMSNorm")): (
                ": pass --normalization RMSNorm, or --qk-layernorm-width head"
            ),
        },
        (
            "full_attention_kv_channels",
            "full_attention_query_groups",
            Setting("keys_as_values", ("full_attention",)),
        ): {
            Setting("window_attn_skip_freq", (None,)): (
                ": it distinguishes layers with and without a window; pass --window-size and this too, or "
                "remove it"
            ),
        },
        "window_attn_skip_freq": {Setting("window_size", (None,)): ": pass both, or remove it"},
        "num_kv_shared_layers": {
            (HAS_RECURRENT_MIXER, "hybrid_override_pattern", "mtp_num_layers"): (
                ": no keys are shared there; remove one"
            ),
        },
        "qk_clip": {
            ("qk_layernorm", "clip_qkv"): ", which bounds the scores itself: remove one of them",
            _AS_VALUES: ": scaled keys would scale the values; remove one of them",
            "num_kv_shared_layers": ": the scores of several layers depend on the same keys; remove one",
            "compile": " is not supported: remove one of them",
            ("optimizer_cpu_offload", "optimizer_nvme_offload"): (
                ": weights are only scaled on the device; pass --zero-stage 1 to shard the state instead"
            ),
        },
        "qk_layernorm_after_rope": {
            Setting("qk_layernorm_width", ("all_heads",)): ": pass --qk-layernorm-width head",
            ("clip_qkv", "num_kv_shared_layers", _AS_VALUES): " is not supported: remove one of them",
        },
        "window_size": {IS_BERT: ", whose attention is bidirectional: remove it"},
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("num_kv_shared_layers", "num_layers", ": pass fewer", is_strict=True),
    )

    @property
    def has_usual_softmax(self) -> bool:
        """Return whether weights are the softmax of a query's scaled scores, as all kernels compute them."""
        return self.attn_logit_softcapping is None and self.softmax_type == "vanilla"


@dataclass(frozen=True)
class LatentOptions:
    """Options of multi-latent attention."""

    section: ClassVar[str] = "latent_attention"

    multi_latent_attention: bool = False
    """Compute keys and values from one narrow vector per token, the latent, which is all that generation
    keeps (DeepSeek-V2 and V3; docs/attention.md)."""
    q_lora_rank: int | None = option(None, allowed=SIZE, **_LATENT)
    """Width of the latent of queries. By default queries are projected from the hidden states."""
    kv_lora_rank: int = option(32, allowed=SIZE, **_LATENT)
    """Width of the latent of keys and values."""
    qk_head_dim: int = option(128, allowed=SIZE, **_LATENT)
    """Elements of each head's queries and keys without rotary positions."""
    qk_pos_emb_head_dim: int = option(64, allowed=_PAIRS, **_LATENT)
    """Elements of queries and keys that rotary positions rotate; all heads share those of a key."""
    v_head_dim: int = option(128, allowed=SIZE, **_LATENT)
    """Size of a head's values."""
    latent_norm_epsilon: float | None = option(
        None, allowed=NOT_NEGATIVE, same_shapes=True, in_megatron=False, **_LATENT
    )
    """Epsilon of the norms of latents. By default --layernorm-epsilon."""

    conflicts: ClassVar[Conflicts] = {
        _LATENTS: {
            Setting("position_embedding_type", other_than("rope", "none")): (
                ": pass --position-embedding-type rope, or none"
            ),
        },
        Setting("qk_layernorm_width", other_than("head")): {
            _LATENTS: ", where --qk-layernorm normalizes the latents: remove it",
        },
        "attention_output_gate": {_LATENTS: ": its queries have no gates; remove it"},
        "num_kv_shared_layers": {_LATENTS: ", whose layers share no keys; remove it"},
        _AS_VALUES: {_LATENTS: ", whose values are no keys; remove it"},
        "value_layernorm": {_LATENTS: ", whose values have no norm; remove it"},
        "full_attention_kv_channels": {_LATENTS: ": all layers have heads of one size; remove it"},
        "full_attention_query_groups": {_LATENTS: ": each head has its own keys; remove it"},
        "qk_layernorm_after_rope": {_LATENTS: ", whose latents are not rotated; remove it"},
        "clip_qkv": {_LATENTS: ", whose keys and values are latents; remove it"},
        "qk_clip": {_LATENTS: ", whose keys have a part that all heads share; remove it"},
    }


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

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the numbers of earlier layers whose keys and values the layer has in place of its own."""
        return () if self.key_source is None else (self.key_source,)

    @property
    def projected_features(self) -> tuple[int, ...]:
        """Return the features that each projection to heads computes."""
        return (self.num_groups * sum(self.group_heads) * self.head_dim,)

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

    @property
    def projected_features(self) -> tuple[int, ...]:
        """Return the features that each projection to heads computes."""
        return self.num_heads * self.head_dim, self.num_heads * (self.key_dim + self.value_dim)

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of elements of the matrices."""
        queries, values = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        from_latents = self.num_heads * (self.key_dim + self.value_dim) * self.latent_width
        rows = self.latent_width + self.head_dim - self.key_dim + values
        if self.query_width is None:
            return from_latents + hidden_size * (rows + queries)
        return from_latents + self.query_width * queries + hidden_size * (rows + self.query_width)
