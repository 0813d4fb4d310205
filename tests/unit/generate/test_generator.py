"""Generation: greedy text of transformers for the same weights, and its decoding token by token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from megalite.attention.cache import CachedCore
from megalite.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, TokenizerFiles, build_tokenizer
from megalite.frontends.huggingface.families import config_of, from_hf
from megalite.generate.generator import Generator, Prompt, Sampler, Sampling, TextStream, text_of
from tests.stages import build_stage
from tests.unit.model.test_against_transformers import InDoublePrecision, as_saved

VOCAB, EOD, NUM_NEW = 301, 0, 12
COMMON = {"vocab_size": VOCAB, "bos_token_id": EOD, "eos_token_id": EOD, "pad_token_id": EOD}
THEIRS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_layer=2, n_head=3, n_embd=24, n_positions=240, **COMMON)),
    "bloom": (BloomForCausalLM, BloomConfig(n_layer=2, n_head=3, hidden_size=24, **COMMON)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=32,
            intermediate_size=37,
            max_position_embeddings=240,
            tie_word_embeddings=False,
            **COMMON,
        ),
    ),
}


SIZES = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32},
    **{"intermediate_size": 37, "max_position_embeddings": 240},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 10},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LAYERS = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": LLAMA3,
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA = {
    **{"head_dim": 10, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0},
    **{"final_logit_softcapping": 3.0},
}
SCALED_QUERIES = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 6},
    "llama_4_scaling_beta": 0.5,
}
MAMBA = {
    **{"head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7},
    **{"conv_kernel": 3, "use_bias": True},
    **{"chunk_size": 4, "num_hidden_layers": None},
}
LATENT = {
    **{**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 4, "kv_lora_rank": 10},
    **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 6},
        **{"mscale": 0.7, "mscale_all_dim": 0.9},
    },
}
NO_CAP = {"attn_logit_softcapping": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
RECURRENT = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 5},
}
THEIRS |= {
    "llama3": (LlamaForCausalLM, LlamaConfig(**SIZES, **COMMON, rope_parameters=LLAMA3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, **COMMON, **WINDOW)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **COMMON, head_dim=10)),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES, **COMMON)),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config(**SIZES, **COMMON, **LAYERS)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES, **COMMON, **GEMMA, sliding_window=6)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **COMMON, **{**GEMMA, **NO_CAP}, **LAYERS)),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **{**SIZES, "num_hidden_layers": 6, "hidden_size": 64, "max_position_embeddings": 240},
            **COMMON,
            **{"head_dim": 10, "global_head_dim": 12, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            **{"hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": VOCAB},
            **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12},
            experts_implementation="eager",
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            rope_parameters={
                "full_attention": {
                    **{"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            final_logit_softcapping=3.0,
        ),
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**SIZES, **COMMON, **RECURRENT, num_experts=0),
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SIZES, **COMMON, **RECURRENT)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SIZES, **COMMON)),
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config(**SIZES, **COMMON, head_dim=10, rope_parameters=SCALED_QUERIES),
    ),
    "gptj": (
        GPTJForCausalLM,
        GPTJConfig(n_layer=2, n_head=3, n_embd=24, n_positions=240, rotary_dim=4, **COMMON),
    ),
    "nemotron_h": (
        NemotronHForCausalLM,
        NemotronHConfig(
            layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            **{**SIZES, **COMMON, **MAMBA},
            **{"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 12, "moe_latent_size": 10},
            experts_implementation="eager",
        ),
    ),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config(**LATENT, **COMMON, q_lora_rank=None)),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**LATENT, **COMMON, q_lora_rank=12, num_nextn_predict_layers=0),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            hidden_size=32,
            intermediate_size=20,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=5,
            max_position_embeddings=256,
            attn_implementation="eager",
            experts_implementation="eager",
            **COMMON,
        ),
    ),
    "gpt_neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_size=32,
            intermediate_size=37,
            max_position_embeddings=240,
            rope_parameters={"partial_rotary_factor": 0.5},
            **COMMON,
        ),
    ),
}
EXPERTS = {"moe_intermediate_size": 9, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 11}
THEIRS |= {
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(**SIZES, **COMMON, **EXPERTS, num_experts=5, mlp_only_layers=[2]),
    ),
    "qwen3_next_experts": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**SIZES, **COMMON, **RECURRENT, **EXPERTS, num_experts=5, decoder_sparse_step=2),
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(**SIZES, **COMMON, **RECURRENT, **EXPERTS, num_experts=5),
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **{**SIZES, **COMMON, "head_dim": 8, "attention_bias": True, "use_qk_norm": True},
            **{"moe_intermediate_size": 9, "num_experts_per_tok": 2, "n_routed_experts": 6, "n_group": 2},
            num_mtp_layers=0,
        ),
    ),
    "minimax_m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config(
            **SIZES, **COMMON, head_dim=10, rotary_dim=4, num_local_experts=5, num_experts_per_tok=2
        ),
    ),
}
SHARED = {"moe_intermediate_size": 9, "num_experts_per_tok": 2, "n_shared_experts": 1}
OF_ALL = {"moe_intermediate_size": 9, "num_experts_per_tok": 2, "num_shared_experts": 1}
NO_WIDTH = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
GROUPS = {"n_routed_experts": 6, "n_group": 2, "norm_topk_prob": True}
FACTORS = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "logits_scaling": 6.0,
}
BY_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
ERNIE = {"moe_intermediate_size": 9, "moe_num_experts": 6, "moe_k": 2}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
THEIRS |= {
    "arcee": (ArceeForCausalLM, ArceeConfig(**SIZES, **COMMON, head_dim=10)),
    "seed_oss": (
        SeedOssForCausalLM,
        SeedOssConfig(**SIZES, **COMMON, head_dim=10, **NO_DROPOUT),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SIZES, **COMMON, sliding_window=6)),
    "glm": (GlmForCausalLM, GlmConfig(**SIZES, **COMMON, head_dim=8)),
    "glm4": (Glm4ForCausalLM, Glm4Config(**SIZES, **COMMON, head_dim=8)),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config(**SIZES, **COMMON, head_dim=10)),
    "helium": (HeliumForCausalLM, HeliumConfig(**SIZES, **COMMON, head_dim=8)),
    "ministral": (MinistralForCausalLM, MinistralConfig(**SIZES, **COMMON, head_dim=10, sliding_window=6)),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config(**SIZES, **COMMON, sliding_window=6)),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZES, **COMMON, head_dim=10)),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config(**SIZES, **COMMON, sliding_window=6)),
    "stablelm": (
        StableLmForCausalLM,
        StableLmConfig(**SIZES, **COMMON, use_parallel_residual=True),
    ),
    "phi": (PhiForCausalLM, PhiConfig(**SIZES, **COMMON, qk_layernorm=True)),
    "nemotron": (NemotronForCausalLM, NemotronConfig(**SIZES, **COMMON, mlp_bias=True)),
    "flex_olmo": (
        FlexOlmoForCausalLM,
        FlexOlmoConfig(**SIZES, **COMMON, num_experts=5, num_experts_per_tok=2),
    ),
    "dots1": (
        Dots1ForCausalLM,
        Dots1Config(**SIZES, **COMMON, **SHARED, **GROUPS, max_window_layers=2, sliding_window=6),
    ),
    "solar_open": (
        SolarOpenForCausalLM,
        SolarOpenConfig(**NO_WIDTH, **COMMON, **SHARED, **GROUPS, head_dim=8),
    ),
    "exaone_moe": (
        ExaoneMoeForCausalLM,
        ExaoneMoeConfig(**SIZES, **COMMON, **OF_ALL, num_experts=6, sliding_window=6),
    ),
    "hy_v3": (HYV3ForCausalLM, HYV3Config(**SIZES, **COMMON, **OF_ALL, head_dim=8, num_experts=6)),
    "afmoe": (
        AfmoeForCausalLM,
        AfmoeConfig(
            **SIZES, **COMMON, **OF_ALL, head_dim=8, num_experts=6, sliding_window=6, mup_enabled=True
        ),
    ),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZES, **COMMON, **FACTORS)),
    "granitemoe": (GraniteMoeForCausalLM, GraniteMoeConfig(**SIZES, **COMMON, **FACTORS)),
    "bamba": (
        BambaForCausalLM,
        BambaConfig(
            **SIZES,
            **COMMON,
            **{"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 7, "mamba_chunk_size": 4},
        ),
    ),
    "granitemoehybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **{**SIZES, **COMMON, **FACTORS, "num_hidden_layers": 3},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            **{"num_local_experts": 4, "shared_intermediate_size": 12, "mamba_n_heads": 8},
            **{"mamba_d_state": 7, "mamba_d_conv": 3, "mamba_chunk_size": 4},
        ),
    ),
    "falcon_h1": (
        FalconH1ForCausalLM,
        FalconH1Config(
            **{**SIZES, **COMMON, "num_hidden_layers": 2, "key_multiplier": 0.75, "mamba_d_ssm": 40},
            **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 7, "mamba_chunk_size": 4},
            **{"ssm_multipliers": [1.5, 0.75, 1.25, 1.0, 0.5], "mlp_multipliers": [1.5, 0.75]},
            **{"attention_in_multiplier": 1.5, "ssm_out_multiplier": 0.5},
        ),
    ),
    "olmo_hybrid": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig(
            **{**SIZES, **COMMON, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 5, "linear_value_head_dim": 5},
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
    ),
    "kimi_linear": (
        KimiLinearForCausalLM,
        KimiLinearConfig(
            **{**SIZES, **COMMON, "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6},
            **{"qk_rope_head_dim": 4, "v_head_dim": 5, "linear_head_dim": 6, "linear_num_heads": 3},
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 9},
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config(**SIZES, **COMMON, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8),
    ),
    "cohere": (CohereForCausalLM, CohereConfig(**SIZES, **COMMON)),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config(**SIZES, **COMMON, sliding_window=6)),
    "hunyuan_v1_dense": (
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config(**SIZES, **COMMON, head_dim=10, rope_parameters=BY_ALPHA),
    ),
    "hunyuan_v1_moe": (
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config(**SIZES, **COMMON, head_dim=10, num_experts=5, moe_topk=2),
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig(**SIZES, **COMMON, **ERNIE),
    ),
    "apertus": (ApertusForCausalLM, ApertusConfig(**SIZES, **COMMON)),
    "granite_swa": (GraniteSWAForCausalLM, GraniteSWAConfig(**SIZES, **COMMON, **FACTORS, sliding_window=6)),
}


@pytest.mark.parametrize(
    ("kind", "num_new"),
    [
        *((kind, NUM_NEW) for kind in THEIRS),
        # Past windows and original contexts; an error in the state of a recurrence grows with the tokens.
        *(pytest.param(kind, 200, marks=pytest.mark.slow) for kind in THEIRS),
    ],
)
def test_greedy_text(kind, num_new, one_rank):
    build, hf_config = THEIRS[kind]
    torch.manual_seed(1)
    hf_config._experts_implementation = "eager"  # their fused GEMMs are not in fp64
    theirs = build(hf_config).double().eval()
    for name, parameter in theirs.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith(".weight")
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.3)
    prompts = [[5, 9, 2], [7], [44, 3, 250, 17, 8, 100, 31]]
    expected = []
    for ids in prompts:
        with InDoublePrecision():
            made = theirs.generate(torch.tensor([ids]), max_new_tokens=num_new, do_sample=False)
        expected.append(made[0, len(ids) :].tolist())

    config = dataclasses.replace(config_of(hf_config.to_dict()), params_dtype="fp64")
    ours = build_stage(config, one_rank, range(config.num_layers), seed=0, attention=CachedCore)
    ours.load_state_dict(from_hf(as_saved(theirs, theirs.state_dict()), config, hf_config.model_type))
    generator = Generator(ours, Sampler(Sampling(temperature=0.0), VOCAB, one_rank.tp), EOD)
    made = [[] for _ in prompts]
    for step in generator([Prompt(i, ids, num_new) for i, ids in enumerate(prompts)]):
        for row, token in step.items():
            made[row].append(token)
    assert made == expected


TEXTS = ["plain words", "naïve – “quoted” 日本語", "two\n\nlines  and 🙂🙂 more"]


def bpe():
    return build_tokenizer(
        "HuggingFaceTokenizer", TokenizerFiles(tokenizer_model="scripts/corpus/tokenizer.json")
    )


@pytest.mark.parametrize("build", [ByteTokenizer, bpe])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text(text, build, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    tokenizer = build()
    prompt, ids = tokenizer.encode("In the"), tokenizer.encode(text)
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(i) for i in ids]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join([*pieces, stream.finish()]) == text
    assert text_of(tokenizer, prompt, ids) == text


def test_a_character_that_never_ends_is_replaced():
    tokenizer = ByteTokenizer()
    ids = [*b"ab", *"é".encode()[:1]]
    assert text_of(tokenizer, [32], ids) == "ab\N{REPLACEMENT CHARACTER}"
    many = text_of(tokenizer, [32], [0xFF] * 30 + [*b"c"])
    assert many.endswith("c")
    assert set(many[:-1]) == {"\N{REPLACEMENT CHARACTER}"}


def test_spaces_between_words():
    assert text_of(NullTokenizer(100), [1, 2], [3, 40]) == " 3 40"
