"""The configuration of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from megalite.config.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    MambaSpec,
    attention_spec,
    layer_spec,
)
from megalite.config.option import (
    ABOVE_ONE,
    FRACTION,
    NONZERO_SHARE,
    NOT_NEGATIVE,
    OPEN_SHARE,
    POSITIVE,
    SHARE,
    SIZE,
    OnResume,
    Setting,
    option,
)

Architecture = Literal["gpt", "bert"]
NUM_BERT_SPECIAL = 3
"""Tokens of a BERT's sample besides its segments: one before the first, one after each."""
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
NormPosition = Literal["pre", "post", "output", "sandwich"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "proportional"]
KeysAsValues = Literal["none", "full_attention", "all"]
QKNormWidth = Literal["head", "all_heads"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
RecurrentMixer = Literal["none", "gated_delta_net"]
PlainActivation = Literal["gelu", "gelu_exact", "relu", "squared_relu"]
GatedActivation = Literal["swiglu", "geglu", "geglu_exact", "quick_geglu", "reglu"]
Activation = Literal[PlainActivation, GatedActivation]
ParamsDtype = Literal["fp32", "bf16", "fp16", "fp64"]
RouterScores = Literal["softmax", "sigmoid"]
LoadBalancing = Literal["seq_aux_loss", "global_aux_loss", "aux_loss", "none"]
DropPolicy = Literal["probs", "position"]
AttentionBackend = Literal[
    "auto", "flash", "cudnn", "efficient", "flex", "fused", "triton", "unfused", "local"
]

GATED_ACTIVATIONS = get_args(GatedActivation)
"""Activations whose input has two halves: a gate, and the values that it multiplies."""
MOST_LAYERS = 10_000
"""Layers up to which a model's layers are compared: a damaged checkpoint may name any number of them."""
_GATED_FFN_MULTIPLE = 64
_NUMBER: dict[str, Any] = {"allowed": POSITIVE, "same_shapes": True, "in_megatron": False}
_ROPE: dict[str, Any] = {"same_shapes": True, "only_with": Setting("position_embedding_type", ("rope",))}
_SCALED: dict[str, Any] = {
    "same_shapes": True,
    "only_with": Setting("rope_scaling", ("linear", "llama3", "yarn")),
}
_GATED: dict[str, Any] = {"same_shapes": True, "only_with": Setting("activation", GATED_ACTIVATIONS)}
_FULL_ATTENTION: dict[str, Any] = {"allowed": SIZE, "in_megatron": False}
_LLAMA3: dict[str, Any] = {**_SCALED, "only_with": Setting("rope_scaling", ("llama3",)), "in_megatron": False}
_YARN: dict[str, Any] = {**_SCALED, "only_with": Setting("rope_scaling", ("yarn",)), "in_megatron": False}
_LATENT: dict[str, Any] = {"only_with": "multi_latent_attention"}
_HAS_EXPERTS = Setting("num_experts", ABOVE_ONE)
_EXPERTS: dict[str, Any] = {"only_with": _HAS_EXPERTS, "in_megatron": False}
_ROUTER: dict[str, Any] = {"same_shapes": True, **_EXPERTS}
_RECURRENT: dict[str, Any] = {"only_with": Setting("recurrent_mixer", ("gated_delta_net",))}
_DELTA_NET: dict[str, Any] = {"allowed": SIZE, **_RECURRENT}
_MAMBA: dict[str, Any] = {"allowed": SIZE, "only_with": "hybrid_override_pattern", "in_megatron": False}


@dataclass(frozen=True)
class ModelConfig:
    """Options of a transformer; all can be combined."""

    default_on_resume: ClassVar[OnResume] = OnResume.MODEL

    architecture: Architecture = option("gpt", in_megatron=False)
    """Kind of model: gpt predicts each next token (pretrain_gpt.py), bert predicts masked tokens from both
    sides (pretrain_bert.py, which sets it)."""
    bert_binary_head: bool = option(
        True,
        sets={"--bert-no-binary-head": False},
        in_megatron=False,
        only_with=Setting("architecture", ("bert",)),
    )
    """BERT: each sample has two segments, and the model also learns, from the first token, to predict whether
    they are in order."""
    mask_prob: float = option(
        0.15,
        allowed=OPEN_SHARE,
        on_resume=OnResume.DATA,
        in_megatron=False,
        only_with=Setting("architecture", ("bert",)),
    )
    """BERT: share of the tokens to predict. 80% of these become the mask token, 10% a random token."""
    num_layers: int = option(12, allowed=SIZE)
    """Number of transformer layers in the whole model."""
    hidden_size: int = option(768, allowed=SIZE)
    """Width of the hidden states (the residual stream)."""
    ffn_hidden_size: int | None = option(None, allowed=SIZE)
    """Width of the MLP. By default 4 x hidden size; with a gated activation 8/3 x hidden size, rounded up
    to a multiple of 64."""
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
    kv_shared_ffn_hidden_size: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Width of the MLP in layers of --num-kv-shared-layers. By default --ffn-hidden-size."""
    hidden_size_per_layer_input: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Size of the embedding of each token that a layer has of its own, and adds through a gate (Gemma 4 E2B).
    By default layers have none."""
    multi_latent_attention: bool = False
    """Compute keys and values from one narrow vector per token, the latent, which is all that generation
    keeps (DeepSeek-V2 and V3; docs/attention.md)."""
    q_lora_rank: int | None = option(None, allowed=SIZE, **_LATENT)
    """Width of the latent of queries. By default queries are projected from the hidden states."""
    kv_lora_rank: int = option(32, allowed=SIZE, **_LATENT)
    """Width of the latent of keys and values."""
    qk_head_dim: int = option(128, allowed=SIZE, **_LATENT)
    """Elements of each head's queries and keys without rotary positions."""
    qk_pos_emb_head_dim: int = option(64, allowed=SIZE, **_LATENT)
    """Elements of queries and keys that rotary positions rotate; all heads share those of a key."""
    v_head_dim: int = option(128, allowed=SIZE, **_LATENT)
    """Size of a head's values."""
    seq_length: int = option(1024, "--encoder-seq-length", allowed=SIZE, same_shapes=True)
    """Sequence length: tokens per sample."""
    max_position_embeddings: int | None = option(
        None, allowed=SIZE, only_with=Setting("position_embedding_type", ("learned_absolute", "rope", "none"))
    )
    """Rows of the learned position table, or the longest context that a converted model names. By default the
    sequence length, or the length that --rope-scaling reaches."""
    vocab_size: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Vocabulary size before padding. By default the tokenizer's."""
    make_vocab_size_divisible_by: int = option(
        128, allowed=SIZE, on_resume=OnResume.FREE, only_with=Setting("pad_vocab_size_to", (None,))
    )
    """Pad the vocabulary to a multiple of this and of the tensor-parallel size."""
    pad_vocab_size_to: int | None = option(
        None, "--padded-vocab-size", allowed=SIZE, on_resume=OnResume.FREE, in_megatron=False
    )
    """Pad the vocabulary to exactly this size, instead of to a multiple."""
    position_embedding_type: PositionEmbedding = option(
        "learned_absolute",
        sets={"--use-rotary-position-embeddings": "rope"},
        choices={"rotary": "rope", "absolute": "learned_absolute"},
        same_shapes=("rope", "alibi", "none"),
    )
    """Position embedding: a learned table, rotary (rope), ALiBi's attention bias, or none."""
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
        only_with=Setting("rope_scaling", ("llama3", "yarn")),
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
        None,
        allowed=POSITIVE,
        same_shapes=True,
        only_with=Setting("rope_scaling", ("llama3", "yarn")),
        in_megatron=False,
    )
    """Multiply queries by 1 + this x ln(1 + floor(position / --original-max-position-embeddings)), as in
    Ministral 3."""
    no_rope_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, **_ROPE)
    """Layers without rotary positions: every Nth. Or a list with 1 for each layer without them and 0 for each
    other layer."""
    normalization: Normalization = "LayerNorm"
    """Normalization layer."""
    norm_position: NormPosition = option("pre", in_megatron=False)
    """Normalize each block's input (pre: GPT-2), its output before the sum (output: OLMo 2), both (sandwich:
    Gemma 2), or the sum (post: the published BERT)."""
    parallel_residual: bool = option(False, only_with=Setting("norm_position", ("pre",)), in_megatron=False)
    """Compute attention and MLP of a layer from the same hidden states, each with its norm, and add both
    (GPT-NeoX), instead of one after the other."""
    parallel_shared_norm: bool = option(
        False, only_with=(Setting("parallel_residual"), Setting("norm_position", ("pre",))), in_megatron=False
    )
    """With --parallel-residual, attention and MLP share one norm (GPT-J)."""
    norm_epsilon: float = option(1e-5, "--layernorm-epsilon", allowed=NOT_NEGATIVE, same_shapes=True)
    """Epsilon of the normalization layers."""
    latent_norm_epsilon: float | None = option(
        None, allowed=NOT_NEGATIVE, same_shapes=True, in_megatron=False, **_LATENT
    )
    """Epsilon of the norms of latents. By default --layernorm-epsilon."""
    zero_centered_norms: bool = option(
        False, "--apply-layernorm-1p", "--layernorm-zero-centered-gamma", in_megatron=False
    )
    """Norms multiply by 1 + weight, as Gemma's do, instead of by the weight. Initial weights are then 0."""
    activation: Activation = option(
        "gelu",
        sets={"--swiglu": "swiglu", "--quick-geglu": "quick_geglu", "--squared-relu": "squared_relu"},
        same_shapes=get_args(PlainActivation),
        in_megatron=False,
    )
    """Activation of the MLP. gelu is the tanh approximation, gelu_exact the erf form; swiglu, geglu (Gemma),
    geglu_exact, quick_geglu (GPT-OSS) and reglu are gated."""
    activation_func_clamp_value: float | None = option(None, allowed=POSITIVE, **_GATED)
    """Bound the gate of a gated activation from above, and the values that it multiplies from both sides
    (GPT-OSS: 7)."""
    glu_linear_offset: float = option(0.0, allowed=NOT_NEGATIVE, **_GATED)
    """Number to add to the values that the gate of a gated activation multiplies (GPT-OSS: 1)."""
    embedding_multiplier: float = option(1.0, "--mup-embedding-mult", **_NUMBER)
    """Factor of the token embeddings. Gemma's is the square root of the hidden size."""
    logit_multiplier: float = option(1.0, **_NUMBER)
    """Factor of the output layer's input, and so of the logits."""
    final_logit_softcapping: float | None = option(None, **_NUMBER)
    """Replace each logit x by C tanh(x / C), as in Gemma 2."""
    attn_logit_softcapping: float | None = option(None, **_NUMBER)
    """Replace each scaled attention score x by C tanh(x / C), as in Gemma 2."""
    query_pre_attn_scalar: float | None = option(None, **_NUMBER)
    """Divide attention scores by the square root of this. By default of the head size."""
    mup_base_width: int | None = option(None, "--mup-base-hidden-size", **{**_NUMBER, "allowed": SIZE})
    """Use muP: initial weights, learning rates and logits are scaled so that hyperparameters tuned at this
    hidden size fit --hidden-size."""
    mup_base_head_dim: int | None = option(None, **{**_NUMBER, "allowed": SIZE}, only_with="mup_base_width")
    """With --mup-base-width: head size B of the base model. Scores are divided by d / sqrt(B), where d is the
    head size. By default B is d."""
    attention_output_gate: bool = False
    """Multiply each head's output by the sigmoid of a gate, which the query projection also computes
    (Qwen3-Next)."""
    softmax_type: SoftmaxType = option("vanilla", same_shapes=("vanilla", "off-by-one"))
    """What attention's softmax adds to its sum over keys: nothing (vanilla), 1 (off-by-one), or exp of a
    learned logit per query head (learnable: the sinks of GPT-OSS)."""
    add_bias_linear: bool = option(True, sets={"--disable-bias-linear": False})
    """Add a bias to every linear layer."""
    add_qkv_bias: bool = option(False, only_with=Setting("add_bias_linear", (False,)))
    """Add a bias to the queries, keys and values even with --disable-bias-linear, as Qwen 2 does. In
    multi-latent attention, add it to the projections to latents."""
    add_attention_output_bias: bool = option(
        False, only_with=Setting("add_bias_linear", (False,)), in_megatron=False
    )
    """Add a bias to the output of attention even with --disable-bias-linear. With --add-qkv-bias, it is
    transformers' attention_bias."""
    add_mlp_bias: bool = option(False, only_with=Setting("add_bias_linear", (False,)), in_megatron=False)
    """Add a bias to the linear layers of the MLP even with --disable-bias-linear, as GPT-J does."""
    add_output_bias: bool = option(False, only_with=Setting("architecture", ("gpt",)), in_megatron=False)
    """Add a bias to the logits, as GPT-J does. A BERT always does."""
    clip_qkv: float | None = option(None, **_NUMBER)
    """Bound queries, keys and values before rotary positions, after their norms (OLMoE)."""
    qk_layernorm: bool = False
    """Normalize queries and keys before attention, with the norm of --normalization. In multi-latent
    attention, normalize the latents."""
    qk_layernorm_width: QKNormWidth = option("head", only_with="qk_layernorm", in_megatron=False)
    """Normalize each head's queries and keys, with one weight for all heads (Qwen 3), or all heads together
    (all_heads: OLMo 2)."""
    qk_clip: bool = option(False, on_resume=OnResume.SETTING)
    """After each update, scale down the queries and keys of heads whose largest attention score was above
    --qk-clip-threshold."""
    qk_clip_threshold: float = option(
        100.0, allowed=POSITIVE, on_resume=OnResume.SETTING, only_with="qk_clip"
    )
    """Largest attention score, after scaling, that --qk-clip leaves."""
    qk_clip_alpha: float = option(0.5, allowed=SHARE, on_resume=OnResume.SETTING, only_with="qk_clip")
    """Power of the factor by which --qk-clip scales queries; keys get the rest, 1 minus this."""
    value_layernorm: bool = option(False, in_megatron=False)
    """Normalize each head's values by an RMSNorm without a weight (Gemma 4)."""
    layer_output_scale: bool = option(False, in_megatron=False)
    """Multiply the hidden states after each layer by a learned number, which begins as 1 (Gemma 4)."""
    embed_layernorm: bool = False
    """Normalize the embeddings before the first layer, as BLOOM does."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of the token embedding's."""
    hidden_dropout: float = option(0.1, allowed=FRACTION, on_resume=OnResume.SETTING)
    """Dropout probability of the embeddings and of each block's output."""
    attention_dropout: float = option(0.1, allowed=FRACTION, on_resume=OnResume.SETTING)
    """Dropout probability of the attention weights."""
    window_size: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, same_shapes=True)
    """Sliding-window attention, W,0: a token attends to itself and at most W tokens before it, and to none
    after it. By default to all tokens before it."""
    window_attn_skip_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, same_shapes=True)
    """Layers without the window: every Nth. Or a list with 1 for each layer with the window and 0 for each
    other layer, such as [1]*3+[0]. By default all layers have it."""
    recurrent_mixer: RecurrentMixer = option("none", "--experimental-attention-variant", in_megatron=False)
    """Replace attention in some layers by a recurrence, whose cost per token does not grow with the sample:
    gated_delta_net, as in Qwen3-Next and Qwen3.5 (docs/recurrent.md)."""
    linear_attention_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, **_RECURRENT)
    """Layers with attention: every Nth. Or a list with 1 for each layer with --recurrent-mixer and 0 for each
    layer with attention. By default no layer has attention."""
    linear_conv_kernel_dim: int = option(4, **_DELTA_NET)
    """Tokens that the convolution before the recurrence sees: a token and those before it."""
    linear_key_head_dim: int = option(128, **_DELTA_NET)
    """Size of a query or key head of Gated DeltaNet."""
    linear_value_head_dim: int = option(128, **_DELTA_NET)
    """Size of a value head of Gated DeltaNet."""
    linear_num_key_heads: int = option(16, **_DELTA_NET)
    """Number of query and of key heads of Gated DeltaNet."""
    linear_num_value_heads: int = option(32, **_DELTA_NET)
    """Number of value heads of Gated DeltaNet, a multiple of its key heads."""
    hybrid_override_pattern: str | None = option(None, "--hybrid-layer-pattern", in_megatron=False)
    """One block for each layer: M is Mamba-2, * attention, - an MLP, E experts (docs/hybrid.md)."""
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
        only_with=(Setting("hybrid_override_pattern"), Setting("add_bias_linear", (False,))),
        in_megatron=False,
    )
    """Add a bias to the projections of Mamba-2 even with --disable-bias-linear."""
    mamba_min_time_step: float = option(0.0, **{**_MAMBA, "allowed": NOT_NEGATIVE})
    """Smallest time step of Mamba-2; transformers' Nemotron-H has 0.001."""
    mtp_num_layers: int = option(0, allowed=NOT_NEGATIVE, in_megatron=False)
    """Modules of multi-token prediction after the last layer: each is a layer that also predicts one token
    further ahead (DeepSeek-V3)."""
    mtp_loss_scaling_factor: float = option(
        0.1, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, in_megatron=False, only_with="mtp_num_layers"
    )
    """Weight in the loss of the mean over the losses of --mtp-num-layers, logged as mtp_1_loss and so on."""
    num_experts: int | None = option(None, allowed=SIZE, in_megatron=False)
    """Replace MLPs by this many experts each, of which a router selects some for each token
    (docs/experts.md). 1 is a dense model."""
    moe_router_topk: int = option(2, allowed=SIZE, **_ROUTER)
    """Number of experts for each token."""
    moe_ffn_hidden_size: int | None = option(None, allowed=SIZE, **_EXPERTS)
    """Width of one expert. By default that of the MLP."""
    moe_latent_size: int | None = option(None, allowed=SIZE, **_EXPERTS)
    """Width of the experts' inputs and outputs: each token is projected to it before the experts, and back
    after them (Nemotron 3). By default the hidden size."""
    moe_beside_mlp: bool = option(False, **_EXPERTS)
    """Let layers with experts have an MLP too: both outputs are normalized and added, and the router
    normalizes its input (Gemma 4)."""
    moe_layer_freq: tuple[int, ...] | None = option(None, allowed=NOT_NEGATIVE, **_EXPERTS)
    """Layers with experts: the first and every Nth after it. Or a list with 1 for each of them and 0 for each
    other layer, such as [0]+[1]*11. By default all layers."""
    moe_router_score_function: RouterScores = option("softmax", **_ROUTER)
    """Function of the router's logits."""
    moe_router_pre_softmax: bool = option(
        False, **{**_ROUTER, "only_with": (_HAS_EXPERTS, Setting("moe_router_score_function", ("softmax",)))}
    )
    """Take the softmax over all experts (OLMoE), instead of over the selected ones (Mixtral)."""
    moe_router_num_groups: int | None = option(None, allowed=SIZE, **_ROUTER)
    """Groups of experts, of which a token's experts are in --moe-router-group-topk: those with the highest
    sums of their --moe-router-group-scores best scores (DeepSeek-V3)."""
    moe_router_group_topk: int | None = option(None, allowed=SIZE, **_ROUTER)
    """Number of groups of a token's experts."""
    moe_router_group_scores: int = option(
        2, allowed=SIZE, same_shapes=True, only_with="moe_router_num_groups", in_megatron=False
    )
    """Number of a group's highest scores whose sum is the group's: 2 in DeepSeek-V3, 1 in DeepSeek-V2."""
    moe_router_topk_scaling_factor: float = option(1.0, allowed=POSITIVE, **_ROUTER)
    """Factor of the weights of a token's experts."""
    moe_router_enable_expert_bias: bool = option(False, **_EXPERTS)
    """Add a bias to the scores that select experts, but not to their weights. Each update changes it to even
    out their use (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = option(
        1e-3,
        allowed=NOT_NEGATIVE,
        on_resume=OnResume.SETTING,
        only_with="moe_router_enable_expert_bias",
        in_megatron=False,
    )
    """Amount by which an update changes the bias of each expert."""
    moe_shared_expert_intermediate_size: int | None = option(None, allowed=SIZE, **_EXPERTS)
    """Width of an MLP that computes all tokens beside the experts. By default there is none."""
    moe_shared_expert_gate: bool = option(False, **_EXPERTS)
    """Multiply the shared expert's output by the sigmoid of a gate, one number for each token (Qwen2-MoE)."""
    moe_router_load_balancing_type: LoadBalancing = option(
        "seq_aux_loss", on_resume=OnResume.SETTING, **_EXPERTS
    )
    """Loss against uneven use of the experts: of each sample (seq_aux_loss), by the loads of the last
    global batch (global_aux_loss), of each microbatch (aux_loss), or none."""
    moe_aux_loss_coeff: float = option(0.01, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, **_EXPERTS)
    """Weight of that loss. Megatron-LM's default is 0."""
    moe_z_loss_coeff: float = option(0.0, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, **_EXPERTS)
    """Weight of the squared log-sum-exp of the router's logits in the loss, which keeps them small."""
    moe_input_jitter_eps: float | None = option(
        None, allowed=OPEN_SHARE, on_resume=OnResume.SETTING, **_EXPERTS
    )
    """In training, multiply the router's input by random numbers from 1 - EPS to 1 + EPS."""
    moe_expert_capacity_factor: float | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.SETTING, **_EXPERTS
    )
    """In training, limit an expert to this many times the mean number of tokens of an expert in a sample; it
    drops the others. By default no token is dropped."""
    moe_token_drop_policy: DropPolicy = option(
        "probs",
        on_resume=OnResume.SETTING,
        **{**_EXPERTS, "only_with": (_HAS_EXPERTS, Setting("moe_expert_capacity_factor"))},
    )
    """Tokens that an expert keeps: those with the highest weights (probs), or the first ones (position)."""
    moe_router_force_load_balancing: bool = option(False, on_resume=OnResume.SETTING, **_EXPERTS)
    """In training, send tokens to random experts, for benchmarks: no expert has many more than others, and
    the model does not learn to route."""
    attention_backend: AttentionBackend = option("auto", on_resume=OnResume.FREE, in_megatron=False)
    """Kernel that computes attention. fused: any of flash, cudnn and efficient. Attention dropout needs
    triton (CUDA GPUs), unfused or local (docs/attention.md)."""
    z_loss_coeff: float = option(0.0, allowed=NOT_NEGATIVE, on_resume=OnResume.SETTING, in_megatron=False)
    """Add this times the mean square of the logarithm of each token's sum of exp(logits) to the loss (z-loss:
    PaLM's is 1e-4). It is logged as z_loss."""
    init_method_std: float = option(0.02, allowed=NOT_NEGATIVE, on_resume=OnResume.LOGGED)
    """Standard deviation of the initial weights, divided by sqrt(2 x layers) for output projections."""
    params_dtype: ParamsDtype = option(
        "fp32", sets={"--bf16": "bf16", "--fp16": "fp16"}, on_resume=OnResume.SETTING, in_megatron=False
    )
    """Precision of weights and activations. With bf16 and fp16, main weights, Adam's moments and gradient
    sums are in fp32."""

    @property
    def is_causal(self) -> bool:
        """Return whether a token attends only to itself and earlier tokens."""
        return self.architecture == "gpt"

    def layer_spec(self, number: int) -> LayerSpec:
        """Return a layer by its number in the whole model."""
        specs = self._specs
        if number not in specs:
            specs[number] = layer_spec(self, number)
        return specs[number]

    @cached_property
    def _specs(self) -> dict[int, LayerSpec]:
        """Return the layers that have been computed, by their numbers."""
        return {}

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return all layers."""
        return tuple(map(self.layer_spec, range(self.num_layers)))

    @cached_property
    def head_specs(self) -> tuple[AttentionSpec, ...]:
        """Return the attention of layers with keys of their own, one for each size of heads.

        A model without attention has an attention core too, with the sizes of the flags.
        """
        found: dict[tuple[int, ...], AttentionSpec] = {}
        for number in range(min(self.num_layers, MOST_LAYERS)):
            spec = self.layer_spec(number).attention
            if spec is not None and spec.key_source is None:
                found.setdefault((spec.head_dim, spec.num_kv_heads, *spec.group_heads), spec)
        return tuple(found.values()) or (attention_spec(self, 0),)

    @property
    def max_head_dim(self) -> int:
        """Return the largest size of an attention head in any layer."""
        return max(spec.head_dim for spec in self.head_specs)

    @property
    def latent_epsilon(self) -> float:
        """Return the epsilon of the norms of latents."""
        return self.norm_epsilon if self.latent_norm_epsilon is None else self.latent_norm_epsilon

    @property
    def has_recurrent_layers(self) -> bool:
        """Return whether layers can have a recurrent mixer in the place of attention."""
        return self.recurrent_mixer != "none" or self.has_mamba

    @property
    def has_mamba(self) -> bool:
        """Return whether layers have Mamba-2."""
        return "M" in (self.hybrid_override_pattern or "")

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that add to the hidden states: one or two for each layer."""
        return self.num_layers if self.hybrid_override_pattern is not None else 2 * self.num_layers

    @property
    def depends_on_micro_batch(self) -> bool:
        """Return whether another micro-batch size trains another run."""
        return self.has_experts and self.moe_router_load_balancing_type == "aux_loss"

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

    @property
    def mamba(self) -> MambaSpec:
        """Return Mamba-2, which --hybrid-override-pattern gives to layers."""
        heads = self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
        return MambaSpec(
            self.mamba_state_dim,
            self.mamba_head_dim,
            self.mamba_num_groups,
            heads,
            self.mamba_conv_kernel,
            self.mamba_min_time_step,
        )

    @property
    def has_experts(self) -> bool:
        """Return whether layers can have experts."""
        return self.num_experts is not None and self.num_experts > 1

    @property
    def predicted_share(self) -> float:
        """Return the share of tokens for which the model computes logits."""
        return self.mask_prob if self.architecture == "bert" else 1.0

    @property
    def num_token_types(self) -> int:
        """Return the number of rows of the token-type table: 2 for BERT's segments, 0 without a table."""
        return 2 if self.architecture == "bert" else 0

    @property
    def is_gated(self) -> bool:
        """Return whether the first GEMM of the MLP computes two halves: the gate and the values."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether queries, keys and values have a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_output_bias(self) -> bool:
        """Return whether the output of attention has a bias."""
        return self.add_bias_linear or self.add_attention_output_bias

    @property
    def has_mamba_bias(self) -> bool:
        """Return whether the projections of Mamba-2 have a bias."""
        return self.add_bias_linear or self.mamba_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Return whether the linear layers of the MLP have a bias."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def ffn_size(self) -> int:
        """Return the width of the MLP, resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.is_gated:
            # Three matrices of width 8/3 h have as many weights as two of width 4 h.
            return round_up(-(-8 * self.hidden_size // 3), _GATED_FFN_MULTIPLE)
        return 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Return the width of one expert, resolved."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def expert_hidden_size(self) -> int:
        """Return the size of an expert's inputs and outputs, resolved."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    @property
    def head_dim(self) -> int:
        """Return the size of one head of queries and keys, resolved."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def value_dim(self) -> int:
        """Return the size of one head of values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    def squared_score_divisor(self, head_dim: int) -> float:
        """Return --query-pre-attn-scalar, resolved: d by default, d^2 / B with muP's base head size B."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar
        if self.mup_base_width is None or self.mup_base_head_dim is None:
            return head_dim
        return head_dim**2 / self.mup_base_head_dim

    @property
    def stage_output_size(self) -> int:
        """Return the features of each token that a pipeline stage sends to the next one.

        These are the hidden states and, with --hidden-size-per-layer-input, the embeddings for all layers.
        """
        return self.hidden_size + self.num_layers * (self.hidden_size_per_layer_input or 0)

    @property
    def width_ratio(self) -> float:
        """Return how many times wider the model is than the base model of muP; 1 without muP."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads, resolved."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def num_positions(self) -> int:
        """Return the rows of the learned position table, or the longest context of a model without one."""
        if self.max_position_embeddings is not None:
            return self.max_position_embeddings
        is_scaled = self.position_embedding_type == "rope" and self.rope_scaling in ("llama3", "yarn")
        reached = self.original_max_position_embeddings * self.rope_scaling_factor if is_scaled else 0
        return max(self.seq_length, int(reached))


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below the value."""
    return -(-value // multiple) * multiple
