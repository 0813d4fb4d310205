"""Presets: published models by name, and a tiny model of each family for tests.

Sources: BERT (Devlin et al. 2019), GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, table 2.1), BLOOM
(Le Scao et al. 2022 and the configs of bigscience/bloom*), Llama 2 and 3 (Touvron et al. 2023; Grattafiori et
al. 2024), Qwen 2.5 and 3 (Yang et al. 2024, 2025), OLMo 2 and 3 (Walsh et al. 2025; Ettinger et al. 2025),
DeepSeek-V2 and V3 (DeepSeek-AI 2024 and their configs), Kimi K2 (Kimi Team 2025, arXiv 2507.20534), GLM-4.5
(GLM-4.5 Team 2025, arXiv 2508.06471), Qwen1.5-MoE, Qwen3-Next, MiniMax-M2 and Nemotron 3 (their configs),
Nemotron-H (NVIDIA 2025, arXiv 2504.03624, and its config), Gemma 2 and 3 (Gemma Team 2024, 2025 and their
configs), Gemma 4 (its configs), GPT-OSS (OpenAI 2025, arXiv 2508.10925, and its configs), SmolLM 3 (Bakouch
et al. 2025) and Pythia (Biderman et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megalite.config.model.model_config import ModelConfig

_GPT = ModelConfig(vocab_size=50257)
# The paper names weight decay as the only regularization (appendix B), and each sample is seen about once.
_GPT3 = replace(_GPT, hidden_dropout=0.0, attention_dropout=0.0)
_BLOOM = ModelConfig(
    seq_length=2048,
    vocab_size=250680,
    pad_vocab_size_to=250880,
    position_embedding_type="alibi",
    embed_layernorm=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
_GPTJ = replace(
    _GPT,
    position_embedding_type="rope",
    rotary_percent=0.25,
    rotary_interleaved=True,
    parallel_residual=True,
    parallel_shared_norm=True,
    add_bias_linear=False,
    add_mlp_bias=True,
    add_output_bias=True,
    untie_embeddings_and_output_weights=True,
    vocab_size=50400,
)
_LLAMA = ModelConfig(
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
_PYTHIA = ModelConfig(
    position_embedding_type="rope",
    rotary_percent=0.25,
    parallel_residual=True,
    activation="gelu_exact",
    untie_embeddings_and_output_weights=True,
    vocab_size=50432,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
_BERT = ModelConfig(
    architecture="bert",
    vocab_size=30522,
    norm_position="post",
    embed_layernorm=True,
    activation="gelu_exact",
    norm_epsilon=1e-12,
)


def _sized(family: ModelConfig, layers: int, hidden: int, heads: int, seq_length: int) -> ModelConfig:
    return replace(
        family, num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=seq_length
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> ModelConfig:
    model = _sized(_LLAMA, layers, hidden, heads, 8192)
    return replace(model, ffn_hidden_size=ffn, num_query_groups=8, vocab_size=128256, rotary_base=500000.0)


_LLAMA31 = replace(_llama3(32, 4096, 32, 14336), seq_length=131072, rope_scaling="llama3")
_QWEN25 = replace(_LLAMA, add_qkv_bias=True, rotary_base=1e6, norm_epsilon=1e-6, vocab_size=152064)
_QWEN3 = replace(
    _LLAMA,
    qk_layernorm=True,
    num_query_groups=8,
    kv_channels=128,
    rotary_base=1e6,
    norm_epsilon=1e-6,
    vocab_size=151936,
)
_MINISTRAL3 = replace(
    _LLAMA,
    num_query_groups=8,
    rotary_base=1e6,
    rope_scaling="yarn",
    rope_scaling_factor=16.0,
    original_max_position_embeddings=16384,
    yarn_mscale=1.0,
    yarn_mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
    vocab_size=131072,
)
_OLMO2 = replace(
    _LLAMA,
    norm_position="output",
    qk_layernorm=True,
    qk_layernorm_width="all_heads",
    rotary_base=500000.0,
    norm_epsilon=1e-6,
    vocab_size=100352,
)
_OLMO3 = replace(
    _OLMO2,
    vocab_size=100278,
    window_size=(4095, 0),
    window_attn_skip_freq=(4,),
    rope_scaling="yarn",
    window_rope_scaling=False,
)
_GEMMA2 = replace(
    _LLAMA,
    activation="geglu",
    norm_position="sandwich",
    zero_centered_norms=True,
    norm_epsilon=1e-6,
    kv_channels=256,
    query_pre_attn_scalar=256.0,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    window_size=(4095, 0),
    window_attn_skip_freq=(2,),
    vocab_size=256000,
    untie_embeddings_and_output_weights=False,
)
_GEMMA3 = replace(
    _GEMMA2,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    qk_layernorm=True,
    window_size=(511, 0),
    window_attn_skip_freq=(6,),
    rotary_base=1e6,
    window_rotary_base=10000.0,
    vocab_size=262144,
)
_GEMMA4 = replace(
    _GEMMA3,
    seq_length=131072,
    zero_centered_norms=False,
    full_attention_kv_channels=512,
    value_layernorm=True,
    layer_output_scale=True,
    rope_scaling="proportional",
    window_rope_scaling=False,
    query_pre_attn_scalar=1.0,
    final_logit_softcapping=30.0,
)
_GEMMA4_SMALL = replace(_GEMMA4, hidden_size_per_layer_input=256)
_GEMMA4_LARGE = replace(_GEMMA4, seq_length=262144, window_size=(1023, 0), keys_as_values="full_attention")


def _gemma4(family: ModelConfig, layers: int, hidden: int, heads: int, ffn: int, groups: int) -> ModelConfig:
    model = _sized(family, layers, hidden, heads, family.seq_length)
    return replace(model, ffn_hidden_size=ffn, num_query_groups=groups, embedding_multiplier=hidden**0.5)


_NEMOTRON_H = ModelConfig(
    position_embedding_type="none",
    normalization="RMSNorm",
    activation="squared_relu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=131072,
)
_NEMOTRON_3 = replace(
    _NEMOTRON_H,
    num_query_groups=2,
    kv_channels=128,
    mamba_min_time_step=0.001,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="none",
)
_SMOLLM3 = replace(
    _LLAMA,
    no_rope_freq=(4,),
    num_query_groups=4,
    rotary_base=5e6,
    norm_epsilon=1e-6,
    vocab_size=128256,
    untie_embeddings_and_output_weights=False,
)
# Of the norms, those of the latents have this epsilon in both models.
_DEEPSEEK = replace(
    _LLAMA,
    multi_latent_attention=True,
    kv_lora_rank=512,
    qk_layernorm=True,
    rotary_interleaved=True,
    rope_scaling="yarn",
    rope_scaling_factor=40.0,
    original_max_position_embeddings=4096,
    norm_epsilon=1e-6,
)
_GPT_OSS = ModelConfig(
    kv_channels=64,
    num_query_groups=8,
    ffn_hidden_size=2880,
    position_embedding_type="rope",
    rotary_base=150000.0,
    rope_scaling="yarn",
    rope_scaling_factor=32.0,
    original_max_position_embeddings=4096,
    yarn_truncate=False,
    window_size=(127, 0),
    window_attn_skip_freq=(2,),
    softmax_type="learnable",
    normalization="RMSNorm",
    activation="quick_geglu",
    activation_func_clamp_value=7.0,
    glu_linear_offset=1.0,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=201088,
    moe_router_topk=4,
    moe_aux_loss_coeff=0.9,
)


def _tiny(family: ModelConfig) -> ModelConfig:
    """Return a model of four layers; its vocabulary is the one of the corpus's tokenizer."""
    return replace(_sized(family, 4, 64, 4, 64), vocab_size=None, pad_vocab_size_to=None)


PRESETS: Mapping[str, ModelConfig] = {
    "gpt2-124m": _sized(_GPT, 12, 768, 12, 1024),
    # The paper has 24 heads of size 128, which does not match its hidden size of 2048. We use 16 heads.
    "gpt-1.3b": _sized(_GPT3, 24, 2048, 16, 2048),
    "gpt3-175b": _sized(_GPT3, 96, 12288, 96, 2048),
    "bloom-560m": _sized(_BLOOM, 24, 1024, 16, 2048),
    "bloom-176b": _sized(_BLOOM, 70, 14336, 112, 2048),
    "llama2-7b": replace(_sized(_LLAMA, 32, 4096, 32, 4096), ffn_hidden_size=11008, vocab_size=32000),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3.1-8b": _LLAMA31,
    "qwen2.5-7b": replace(_sized(_QWEN25, 28, 3584, 28, 32768), ffn_hidden_size=18944, num_query_groups=4),
    "qwen3-0.6b": replace(
        _sized(_QWEN3, 28, 1024, 16, 32768), ffn_hidden_size=3072, untie_embeddings_and_output_weights=False
    ),
    # 32 heads of 128 elements are the hidden size.
    "qwen3-8b": replace(_sized(_QWEN3, 36, 4096, 32, 32768), ffn_hidden_size=12288, kv_channels=None),
    "qwen3-30b-a3b": replace(
        _sized(_QWEN3, 48, 2048, 32, 40960),
        ffn_hidden_size=6144,
        num_query_groups=4,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_aux_loss_coeff=0.001,
    ),
    "mixtral-8x7b": replace(
        _sized(_LLAMA, 32, 4096, 32, 32768),
        ffn_hidden_size=14336,
        num_query_groups=8,
        rotary_base=1e6,
        vocab_size=32000,
        num_experts=8,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.02,
    ),
    "olmoe-1b-7b": replace(
        _sized(_LLAMA, 16, 2048, 16, 4096),
        ffn_hidden_size=1024,
        qk_layernorm=True,
        qk_layernorm_width="all_heads",
        vocab_size=50304,
        num_experts=64,
        moe_router_topk=8,
        moe_router_pre_softmax=True,
        moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001,
    ),
    "deepseek-v2-lite": replace(
        _sized(_DEEPSEEK, 27, 2048, 16, 163840),
        ffn_hidden_size=10944,
        vocab_size=102400,
        yarn_mscale=0.707,
        yarn_mscale_all_dim=0.707,
        num_experts=64,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_layer_freq=(0,) + (1,) * 26,
        moe_router_pre_softmax=True,
        moe_aux_loss_coeff=0.001,
    ),
    "deepseek-v3": replace(
        _sized(_DEEPSEEK, 61, 7168, 128, 163840),
        q_lora_rank=1536,
        ffn_hidden_size=18432,
        vocab_size=129280,
        yarn_mscale=1.0,
        yarn_mscale_all_dim=1.0,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=(0,) * 3 + (1,) * 58,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.0001,
    ),
    "gpt-oss-20b": replace(_sized(_GPT_OSS, 24, 2880, 64, 131072), num_experts=32),
    "gpt-oss-120b": replace(_sized(_GPT_OSS, 36, 2880, 64, 131072), num_experts=128),
    "kimi-k2": replace(
        _sized(_DEEPSEEK, 61, 7168, 64, 131072),
        q_lora_rank=1536,
        ffn_hidden_size=18432,
        vocab_size=163840,
        rotary_base=50000.0,
        rope_scaling_factor=32.0,
        yarn_beta_fast=1.0,
        yarn_mscale=1.0,
        yarn_mscale_all_dim=1.0,
        num_experts=384,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=(0,) + (1,) * 60,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.827,
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.001,
    ),
    "qwen1.5-moe-a2.7b": replace(
        _sized(_LLAMA, 24, 2048, 16, 8192),
        ffn_hidden_size=5632,
        add_qkv_bias=True,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        vocab_size=151936,
        num_experts=60,
        moe_router_topk=4,
        moe_ffn_hidden_size=1408,
        moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=5632,
        moe_shared_expert_gate=True,
        moe_aux_loss_coeff=0.001,
    ),
    "qwen3-next-80b-a3b": replace(
        _sized(_LLAMA, 48, 2048, 16, 262144),
        num_query_groups=2,
        kv_channels=256,
        qk_layernorm=True,
        attention_output_gate=True,
        zero_centered_norms=True,
        rotary_base=1e7,
        rotary_percent=0.25,
        norm_epsilon=1e-6,
        vocab_size=151936,
        recurrent_mixer="gated_delta_net",
        linear_attention_freq=(4,),
        num_experts=512,
        moe_router_topk=10,
        moe_ffn_hidden_size=512,
        moe_shared_expert_intermediate_size=512,
        moe_shared_expert_gate=True,
        moe_aux_loss_coeff=0.001,
    ),
    "glm-4.5-air": replace(
        _sized(_LLAMA, 46, 4096, 96, 131072),
        ffn_hidden_size=10944,
        num_query_groups=8,
        kv_channels=128,
        add_qkv_bias=True,
        rotary_base=1e6,
        rotary_percent=0.5,
        vocab_size=151552,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=1408,
        moe_layer_freq=(0,) + (1,) * 45,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.0001,
    ),
    "minimax-m2": replace(
        _sized(_LLAMA, 62, 3072, 48, 196608),
        num_query_groups=8,
        kv_channels=128,
        qk_layernorm=True,
        qk_layernorm_width="all_heads",
        rotary_base=5e6,
        rotary_percent=0.5,
        norm_epsilon=1e-6,
        vocab_size=200064,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=1536,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.001,
    ),
    "olmo2-7b": replace(_sized(_OLMO2, 32, 4096, 32, 4096), ffn_hidden_size=11008),
    "olmo3-7b": replace(_sized(_OLMO3, 32, 4096, 32, 65536), ffn_hidden_size=11008),
    "gemma2-2b": replace(
        _sized(_GEMMA2, 26, 2304, 8, 8192),
        ffn_hidden_size=9216,
        num_query_groups=4,
        embedding_multiplier=2304**0.5,
    ),
    "gemma3-1b": replace(
        _sized(_GEMMA3, 26, 1152, 4, 32768),
        ffn_hidden_size=6912,
        num_query_groups=1,
        embedding_multiplier=1152**0.5,
    ),
    "gemma4-e2b": replace(
        _gemma4(_GEMMA4_SMALL, 35, 1536, 8, ffn=6144, groups=1),
        num_kv_shared_layers=20,
        kv_shared_ffn_hidden_size=12288,
        window_attn_skip_freq=(5,),
    ),
    "gemma4-e4b": replace(_gemma4(_GEMMA4_SMALL, 42, 2560, 8, ffn=10240, groups=2), num_kv_shared_layers=18),
    "gemma4-31b": replace(
        _gemma4(_GEMMA4_LARGE, 60, 5376, 32, ffn=21504, groups=16), full_attention_query_groups=4
    ),
    "gemma4-26b-a4b": replace(
        _gemma4(_GEMMA4_LARGE, 30, 2816, 16, ffn=2112, groups=8),
        full_attention_query_groups=2,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=704,
        moe_beside_mlp=True,
        moe_router_load_balancing_type="none",
    ),
    "ministral3-8b": replace(_sized(_MINISTRAL3, 34, 4096, 32, 262144), ffn_hidden_size=14336),
    "smollm3-3b": replace(_sized(_SMOLLM3, 36, 2048, 16, 65536), ffn_hidden_size=11008),
    "gpt-j-6b": _sized(_GPTJ, 28, 4096, 16, 2048),
    "nemotron-h-8b": replace(
        _sized(_NEMOTRON_H, 52, 4096, 32, 8192),
        hybrid_override_pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
        ffn_hidden_size=21504,
        num_query_groups=8,
        mamba_min_time_step=0.001,
    ),
    "nemotron-3-nano-30b": replace(
        _sized(_NEMOTRON_3, 52, 2688, 32, 262144),
        hybrid_override_pattern="MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
        mamba_num_heads=64,
        ffn_hidden_size=1856,
        num_experts=128,
        moe_router_topk=6,
        moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712,
        moe_router_topk_scaling_factor=2.5,
    ),
    "nemotron-3-super-120b": replace(
        _sized(_NEMOTRON_3, 88, 4096, 32, 262144),
        hybrid_override_pattern="MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
        mamba_num_heads=128,
        ffn_hidden_size=2688,
        num_experts=512,
        moe_router_topk=22,
        moe_ffn_hidden_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        moe_router_topk_scaling_factor=5.0,
    ),
    "pythia-6.9b": _sized(_PYTHIA, 32, 4096, 32, 2048),
    "bert-base": _sized(_BERT, 12, 768, 12, 512),
    "bert-large": _sized(_BERT, 24, 1024, 16, 512),
    "gpt-tiny": _tiny(_GPT),
    "bloom-tiny": _tiny(_BLOOM),
    "bert-tiny": _tiny(_BERT),
    "llama-tiny": replace(_tiny(_LLAMA), num_query_groups=2),
    "nemotron-h-tiny": replace(
        _tiny(_NEMOTRON_H),
        hybrid_override_pattern="M*M-",
        num_query_groups=2,
        mamba_head_dim=16,
        mamba_num_groups=4,
        mamba_state_dim=16,
    ),
}
"""The models that `--preset` accepts."""
