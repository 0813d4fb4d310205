"""Names, shapes and configs of transformers' models, and what cannot be converted."""

import dataclasses

import pytest
import torch
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    AutoConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GraniteSWAConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Olmo3Config,
    OlmoHybridConfig,
    Phi3Config,
    Qwen3_5MoeTextConfig,
    SeedOssConfig,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
)

from megalite.config import ModelConfig
from megalite.config.fields import resolved_fields
from megalite.config.presets import PRESETS
from megalite.frontends.huggingface.families import (
    all_entries,
    config_of,
    family_of,
    from_hf,
    hf_config_of,
    to_hf,
)
from megalite.utils.errors import UserError
from tests.stages import build_stage

SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 50}
FAMILIES = {"gpt2": "gpt2-124m", "bloom": "bloom-560m", "llama": "llama2-7b"}
GRANITE_HYBRID = {
    **{"model_type": "granitemoehybrid", "num_hidden_layers": 2, "hidden_size": 24, "vocab_size": 97},
    **{"num_attention_heads": 2, "num_local_experts": 0, "mamba_n_heads": 8, "mamba_d_head": "auto"},
    "layer_types": ["mamba", "attention"],
}
LLAMA = LlamaConfig().to_dict()
FALCON = FalconH1Config().to_dict()
OLMO_HYBRID = OlmoHybridConfig(num_hidden_layers=2).to_dict()
KIMI = KimiLinearConfig(num_hidden_layers=2).to_dict()
LFM2 = Lfm2Config(num_hidden_layers=2).to_dict()
GEMMA3 = Gemma3TextConfig().to_dict()
GEMMA4 = Gemma4TextConfig(hidden_size_per_layer_input=0).to_dict()
GEMMA4_ROTARY = {
    "full_attention": {
        **{"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
PROPORTIONAL = {"rope_type": "proportional", "factor": 2.0}
OF_ALL = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
DEEPSEEK_V3 = DeepseekV3Config().to_dict()


@pytest.fixture(params=FAMILIES)
def stage(request, one_rank):
    """A small model of each family, with numbers of its own in every element."""
    preset = PRESETS[FAMILIES[request.param]]
    config = dataclasses.replace(preset, **SMALL, pad_vocab_size_to=64, ffn_hidden_size=64)
    stage = build_stage(config, one_rank, range(2), seed=0)
    for parameter in stage.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return stage


def without_padding(name, tensor):
    return tensor[:50] if name in ("embedding.word.weight", "output.weight") else tensor


def test_entries_are_the_parameters(stage):
    names = [entry.ours for entry in all_entries(stage.config)]
    assert sorted(names) == sorted(name for name, _ in stage.named_parameters())


def test_a_part_of_the_tensors_is_a_part_of_the_whole(stage):
    full = dict(stage.named_parameters())
    name = "layers.1.attention.qkv.weight"
    part, whole = to_hf({name: full[name]}, stage.config), to_hf(full, stage.config)
    assert part and all(torch.equal(tensor, whole[their_name]) for their_name, tensor in part.items())


def test_there_and_back(stage):
    full = dict(stage.named_parameters())
    back = from_hf(to_hf(full, stage.config), stage.config)
    assert back.keys() == full.keys()
    for name, tensor in back.items():
        assert tensor.shape == full[name].shape
        assert torch.equal(without_padding(name, tensor), without_padding(name, full[name]))
    tables = {"embedding.word.weight", "output.weight"} & back.keys()
    assert not any(torch.count_nonzero(back[name][50:]) for name in tables)


def test_names_of_bare_models_and_of_buffers(stage):
    theirs = to_hf(dict(stage.named_parameters()), stage.config)
    expected = from_hf(theirs, stage.config)
    prefix = family_of(stage.config).prefix
    bare = {name.removeprefix(prefix): tensor for name, tensor in theirs.items()}
    bare["h.0.attn.masked_bias"] = torch.zeros(1)
    result = from_hf(bare, stage.config)
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())


def test_foreign_tensors_are_named(stage):
    theirs = to_hf(dict(stage.named_parameters()), stage.config)
    name, tensor = theirs.popitem()
    with pytest.raises(UserError, match=f"lack {name}"):
        from_hf(theirs, stage.config)
    with pytest.raises(UserError, match="no parameter foreign"):
        to_hf({"foreign": tensor}, stage.config)
    larger = dataclasses.replace(stage.config, vocab_size=60)
    with pytest.raises(UserError, match="50 rows, fewer than --vocab-size 60"):
        from_hf({**theirs, name: tensor}, larger)


def test_shapes_that_cannot_be_the_configs_are_named():
    config = dataclasses.replace(PRESETS["llama2-7b"], **SMALL, num_query_groups=2)
    weights = {name: torch.zeros(10, 16) for entry in all_entries(config) for name in entry.theirs}
    weights |= {name: torch.zeros(50, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    with pytest.raises(UserError, match=r"q_proj.weight \[10, 16\]"):
        from_hf(weights, config)


def test_a_window_of_all_layers_is_mistrals_and_of_some_smollms():
    window = dataclasses.replace(PRESETS["llama2-7b"], window_size=(1023, 0))
    assert hf_config_of(window)["sliding_window"] == 1024
    assert config_of(hf_config_of(window)) == dataclasses.replace(window, pad_vocab_size_to=None)
    assert config_of({**hf_config_of(window), "sliding_window": None}).window_size is None
    pattern = dataclasses.replace(window, window_attn_skip_freq=(2,))
    assert family_of(pattern).model_type == "smollm3"  # with rotary positions in all layers
    with pytest.raises(UserError, match=r"gpt2 cannot be this model: window_size \(7, 0\) \(needs None\)$"):
        family_of(dataclasses.replace(PRESETS["gpt2-124m"], window_size=(7, 0)))


def test_published_configs_are_the_presets():
    assert config_of(GPT2Config().to_dict()) == PRESETS["gpt2-124m"]

    llama3 = {
        **{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
        **{"vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "rope_scaling": None},
    }
    assert config_of(llama3) == PRESETS["llama3-8b"]

    bloom = {  # as the hub has it, with names of long ago
        **{"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
        **{"vocab_size": 250880, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    }
    unpadded = dataclasses.replace(PRESETS["bloom-560m"], vocab_size=250880, pad_vocab_size_to=None)
    assert config_of(bloom) == unpadded


def test_long_windows_keep_their_rotary_positions():
    """A window that hides nothing is dropped only from layers that are like the others without it."""
    longer = Gemma3TextConfig(num_hidden_layers=6, max_position_embeddings=64, sliding_window=512)
    model = config_of(longer.to_dict())
    assert [spec.attention.rotary.base for spec in model.layer_specs] == [*[1e4] * 5, 1e6]
    same = Olmo3Config(num_hidden_layers=6, max_position_embeddings=64, sliding_window=512)
    assert config_of(same.to_dict()).window_size is None


SHARED = {
    **{"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-6},
    **{"num_hidden_layers": 26, "head_dim": 256, "query_pre_attn_scalar": 256},
}
HUB = {
    "gemma2-2b": {
        **{**SHARED, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **{"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 2304},
        **{"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 9216, "num_attention_heads": 8},
        **{"max_position_embeddings": 8192, "num_key_value_heads": 4, "rope_theta": 10000.0},
        **{"sliding_window": 4096, "vocab_size": 256000},
    },
    "gemma3-1b": {
        **{**SHARED, "model_type": "gemma3_text", "attn_logit_softcapping": None, "hidden_size": 1152},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": None, "intermediate_size": 6912},
        **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "rope_local_base_freq": 10000},
        **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6},
        **{"vocab_size": 262144},
    },
    "gemma4-e2b": {
        **{"model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": False, "head_dim": 256},
        **{"enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256},
        **{"intermediate_size": 6144, "max_position_embeddings": 131072, "num_attention_heads": 8},
        **{"num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1},
        **{"num_kv_shared_layers": 20, "rms_norm_eps": 1e-6, "sliding_window": 512, "vocab_size": 262144},
        **{"use_bidirectional_attention": None, "use_double_wide_mlp": True},
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "rope_parameters": GEMMA4_ROTARY,
    },
    "gemma4-e4b": {
        **{"model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": False, "head_dim": 256},
        **{"enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "hidden_size_per_layer_input": 256},
        **{"intermediate_size": 10240, "max_position_embeddings": 131072, "num_attention_heads": 8},
        **{"num_global_key_value_heads": None, "num_hidden_layers": 42, "num_key_value_heads": 2},
        **{"num_kv_shared_layers": 18, "rms_norm_eps": 1e-6, "sliding_window": 512, "vocab_size": 262144},
        **{"use_double_wide_mlp": False, "vocab_size_per_layer_input": 262144},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
        "rope_parameters": GEMMA4_ROTARY,
    },
    "gemma4-31b": {
        **{"model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True, "head_dim": 256},
        **{"enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0},
        **{"intermediate_size": 21504, "max_position_embeddings": 262144, "num_attention_heads": 32},
        **{"num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16},
        **{"num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024, "vocab_size": 262144},
        **{"use_bidirectional_attention": "vision", "use_double_wide_mlp": False},
        **{"vocab_size_per_layer_input": 262144, "num_experts": None, "top_k_experts": None},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "rope_parameters": GEMMA4_ROTARY,
    },
    "gemma4-26b-a4b": {
        **{"model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True, "head_dim": 256},
        **{"enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 512},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "hidden_size_per_layer_input": 0},
        **{"intermediate_size": 2112, "max_position_embeddings": 262144, "num_attention_heads": 16},
        **{"num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8},
        **{"num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024, "vocab_size": 262144},
        **{"moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "rope_parameters": GEMMA4_ROTARY,
    },
    "gpt-oss-20b": {  # without quantization_config, which the published file has
        **{"model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "head_dim": 64},
        **{"experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880},
        **{"initial_context_length": 4096, "max_position_embeddings": 131072, "num_attention_heads": 64},
        **{"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8},
        **{"num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-5},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False},
            "original_max_position_embeddings": 4096,
        },
        **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
        **{"tie_word_embeddings": False, "vocab_size": 201088},
    },
    "gpt-j-6b": {
        **{"model_type": "gptj", "activation_function": "gelu_new", "n_embd": 4096, "n_head": 16},
        **{"n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True, "rotary_dim": 64},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "layer_norm_epsilon": 1e-5},
        **{"scale_attn_weights": True, "tie_word_embeddings": False, "vocab_size": 50400},
    },
    "olmo3-7b": {
        **{"model_type": "olmo3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096},
        **{"intermediate_size": 11008, "max_position_embeddings": 65536, "num_attention_heads": 32},
        **{"num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000},
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 8.0, "rope_type": "yarn"},
            "original_max_position_embeddings": 8192,
        },
        **{"sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278},
    },
    "nemotron-h-8b": {
        **{"model_type": "nemotron_h", "attention_bias": False, "attention_dropout": 0.0, "chunk_size": 128},
        **{"conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 4096},
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        **{"intermediate_size": 21504, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64},
        **{"mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "mlp_bias": False},
        **{"max_position_embeddings": 8192, "mlp_hidden_act": "relu2", "n_groups": 8, "use_bias": False},
        **{"num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8},
        **{"num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False},
        **{"rms_norm_eps": 1e-5, "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 1e-4},
        **{"tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1},
        **{"time_step_min": 0.001, "time_step_rank": 256, "use_conv_bias": True, "use_mamba_kernels": True},
        "vocab_size": 131072,
    },
    "nemotron-3-nano-30b": {
        **{"model_type": "nemotron_h", "attention_bias": False, "attention_dropout": 0.0, "chunk_size": 128},
        **{"conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688},
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        **{"intermediate_size": 1856, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mlp_bias": False},
        **{"mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "n_group": 1},
        **{"max_position_embeddings": 262144, "mlp_hidden_act": "relu2", "n_groups": 8, "use_bias": False},
        **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "topk_group": 1},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "sliding_window": None},
        **{"num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 2},
        **{"num_experts_per_tok": 6, "num_logits_to_keep": 1, "routed_scaling_factor": 2.5},
        **{"partial_rotary_factor": 1.0, "rope_theta": 10000, "ssm_state_size": 128, "time_step_min": 0.001},
        **{"tie_word_embeddings": False, "use_conv_bias": True, "use_mamba_kernels": True},
        "vocab_size": 131072,
    },
    "deepseek-v3": {  # without quantization_config, which the published file has
        **{"model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1},
        **{"first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "kv_lora_rank": 512},
        **{"intermediate_size": 18432, "max_position_embeddings": 163840, "moe_intermediate_size": 2048},
        **{"moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1},
        **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 4096, "type": "yarn"},
        },
        **{"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True},
        **{"tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128},
        "vocab_size": 129280,
    },
    "kimi-k2": {  # without quantization_config and auto_map
        **{"model_type": "kimi_k2", "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1},
        **{"aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168},
        **{"intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072},
        **{"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384},
        **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "topk_group": 1},
        **{"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "seq_aux": True},
        **{"num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "v_head_dim": 128},
        "rope_scaling": {
            **{"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 4096, "type": "yarn"},
        },
        **{"routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "tie_word_embeddings": False},
        **{"topk_method": "noaux_tc", "vocab_size": 163840},
    },
    "qwen1.5-moe-a2.7b": {
        **{"model_type": "qwen2_moe", "attention_dropout": 0.0, "decoder_sparse_step": 1},
        **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_window_layers": 21},
        **{"max_position_embeddings": 8192, "moe_intermediate_size": 1408, "norm_topk_prob": False},
        **{"num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "rms_norm_eps": 1e-6},
        **{"num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False},
        **{"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": 32768},
        **{"shared_expert_intermediate_size": 5632, "tie_word_embeddings": False},
        **{"use_sliding_window": False, "vocab_size": 151936},
    },
    "qwen3-next-80b-a3b": {
        **{"model_type": "qwen3_next", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256},
        **{"decoder_sparse_step": 1, "full_attention_interval": 4, "hidden_act": "silu"},
        **{"hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": []},
        **{"moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16},
        **{"num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48},
        **{"num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25},
        **{"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000, "vocab_size": 151936},
        **{"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512},
        "tie_word_embeddings": False,
    },
    "glm-4.5-air": {
        **{"model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128},
        **{"first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096, "n_group": 1},
        **{"intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "topk_group": 1},
        **{"num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46},
        **{"num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5},
        **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000, "use_qk_norm": False},
        **{"routed_scaling_factor": 1.0, "tie_word_embeddings": False, "vocab_size": 151552},
    },
    "minimax-m2": {  # without quantization_config and auto_map
        **{"model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu"},
        **{"hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608},
        **{"mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256},
        **{"num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rotary_dim": 64},
        **{"rope_theta": 5000000, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
        **{"tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True},
        "vocab_size": 200064,
    },
}
"""As the hub has them; all but Gemma 4 in the form of versions before 5.

Compared with copies of the published files in other projects: gemma4-e2b, gemma4-e4b, gemma4-31b (but for
max_position_embeddings), nemotron-h-8b, glm-4.5-air and minimax-m2 with every number; kimi-k2 with every
number but rms_norm_eps, which is 1e-5 in Kimi K2 Thinking; qwen3-next-80b-a3b with its sizes and its number
of parameters; gpt-j-6b with the defaults of transformers' GPTJConfig.
"""


@pytest.mark.parametrize("preset", HUB)
def test_published_models_are_the_presets(preset):
    model = config_of(HUB[preset])
    assert model.mtp_num_layers == HUB[preset].get("num_nextn_predict_layers", 0)
    assert resolved_fields(dataclasses.replace(model, mtp_num_layers=0)) == resolved_fields(PRESETS[preset])
    name = HUB[preset]["model_type"]
    family = "deepseek_v3" if name == "kimi_k2" else name
    assert family_of(PRESETS[preset]).model_type == family
    with pytest.raises(UserError, match=f"{family} with residual_multiplier 0.2 cannot be converted: mega"):
        config_of({**HUB[preset], "residual_multiplier": 0.2})


SIZES_OF_OLMO = {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_conv_kernel_dim": 4}
SIZES_OF_OLMO |= {"linear_key_head_dim": 96, "linear_value_head_dim": 192}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "olmo_hybrid", "rope_theta": None},
            {**SIZES_OF_OLMO, "position_embedding_type": "none"},
        ),
        ({"model_type": "olmo_hybrid"}, {**SIZES_OF_OLMO, "position_embedding_type": "rope"}),
        (
            {
                "model_type": "kimi_linear",
                "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]},
            },
            {"linear_attention_freq": (1, 0, 1), "moe_shared_expert_intermediate_size": 1024},
        ),
        (
            {"model_type": "kimi_linear", "num_shared_experts": 0},
            {"moe_shared_expert_intermediate_size": None},
        ),
        ({"model_type": "lfm2", "tie_word_embeddings": False}, {"untie_embeddings_and_output_weights": True}),
    ],
)
def test_what_a_file_leaves_out_is_as_in_transformers(config, expected):
    """The file has the sizes alone that our reading needs, with transformers' usual numbers."""
    usual = AutoConfig.for_model(config["model_type"], num_hidden_layers=3).to_dict()
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    names.append("num_key_value_heads")
    if config["model_type"] == "kimi_linear":
        names += ["kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
        names += ["moe_intermediate_size", "num_experts", "num_experts_per_token"]
    model = config_of({**{name: usual[name] for name in names}, **config})
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(
    "config", [GPT2Config(), BloomConfig(), LlamaConfig(), MistralConfig()], ids=lambda c: c.model_type
)
def test_a_converted_config_is_of_its_family(config):
    assert family_of(config_of(config.to_dict())).model_type == config.model_type


@pytest.mark.parametrize(
    ("hf_config", "cause"),
    [
        *(
            ({"model_type": name}, f"'{name}' cannot be converted: gpt2, ")
            for name in ("gemma3n", "gemma3n_text", "gemma4", "deepseek_v32", "deepseek_v4", "glm_moe_dsa")
        ),
        (
            {**GEMMA4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 128},
            "vocab_size_per_layer_input 128 and vocab_size 262144 must be equal",
        ),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention all"),
        ({**GEMMA4, "altup_num_inputs": 4}, "gemma4_text with altup_num_inputs 4"),
        ({**GEMMA4, "per_layer_config": {"5": {"head_dim": 9}}}, "other sizes than one for all layers"),
        ({**GEMMA4, "rope_parameters": {"full_attention": PROPORTIONAL}}, "'proportional' with factor 2.0"),
        (
            {**HUB["gpt-oss-20b"], "quantization_config": {"quant_method": "mxfp4"}},
            "gpt_oss with quantization_config mxfp4 cannot be converted: only weights in bf16",
        ),
        ({**HUB["gpt-oss-20b"], "swiglu_alpha": 1.0}, "gpt_oss with swiglu_alpha 1.0 cannot be converted"),
        (GPTJConfig(rotary_dim=512).to_dict(), "gptj with rotary_dim 512"),
        ({"model_type": "opt"}, "'opt' cannot be converted: gpt2, bloom, llama, mistral, "),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3' without factor"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}, "rope_parameters": None}, "'linear' without factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({**LLAMA, "rope_parameters": {"short_factor": [1.0]}}, r"'default' with short_factor \[1.0\]"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "with partial_rotary_factor 0.5"),
        (
            {**LLAMA, "residual_multiplier": 0.2},
            "llama with residual_multiplier 0.2 cannot be converted: mega",
        ),
        ({**LLAMA, "hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({**HUB["nemotron-3-nano-30b"], "norm_topk_prob": False}, "nemotron_h with norm_topk_prob False"),
        ({**HUB["nemotron-3-nano-30b"], "mlp_bias": True}, "nemotron_h with experts with mlp_bias True"),
        ({**HUB["nemotron-3-nano-30b"], "num_experts_per_tok": 1}, "nemotron_h with num_experts_per_tok 1"),
        ({**HUB["nemotron-h-8b"], "layers_block_type": ["mamba", "conv"]}, "with layers conv cannot be"),
        ({**HUB["nemotron-h-8b"], "use_conv_bias": False}, "nemotron_h with use_conv_bias False cannot"),
        ({**HUB["nemotron-h-8b"], "num_nextn_predict_layers": 1}, "with num_nextn_predict_layers 1 cannot"),
        ({**GRANITE_HYBRID, "mamba_conv_bias": False}, "granitemoehybrid with mamba_conv_bias False cannot"),
        ({**GRANITE_HYBRID, "layer_types": ["mamba", "conv"]}, "granitemoehybrid with layers conv cannot"),
        ({**GRANITE_HYBRID, "layer_types": ["mamba"]}, "granitemoehybrid has 1 layer_types for 2 layers"),
        ({**GRANITE_HYBRID, "time_step_limit": [0.0, 0.1]}, "with a time_step_limit of 0.1 cannot be"),
        ({**GRANITE_HYBRID, "position_embedding_type": "alibi"}, "position_embedding_type alibi cannot be"),
        ({**GRANITE_HYBRID, "mamba_d_head": 8}, "with 8 heads of 8 cannot be converted: mamba_expand needs"),
        (
            {**FALCON, "attention_bias": True},
            "falcon_h1 with attention_bias True cannot be converted: only F",
        ),
        ({**FALCON, "mamba_d_head": 9}, "128 heads of 9 cannot be converted: mamba_d_ssm needs 1024"),
        (
            {**FALCON, "key_multiplier": 0},
            "falcon_h1 with key_multiplier 0 cannot be converted: numbers above",
        ),
        (
            {**FALCON, "mlp_multipliers": [1.0, 1.0, 1.0]},
            r"with mlp_multipliers \[1.0, 1.0, 1.0\] cannot be converted: 2 numbers above 0 can",
        ),
        ({**FALCON, "ssm_multipliers": [1.0, 0.0, 1.0, 1.0, 1.0]}, "cannot be converted: 5 numbers above 0"),
        (
            {**KIMI, "layer_types": None, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": []}},
            r"kda_layers \[1\] and full_attn_layers \[\] cannot .* they must list the layers 1 to 2",
        ),
        ({**LFM2, "tie_embedding": False}, "tie_embedding False and tie_word_embeddings True must be equal"),
        ({**OLMO_HYBRID, "hidden_act": "gelu"}, "olmo_hybrid with hidden_act gelu cannot be converted: only"),
        ({**KIMI, "moe_renormalize": False}, "kimi_linear with moe_renormalize False cannot be converted"),
        ({**KIMI, "mla_use_nope": False}, "kimi_linear with mla_use_nope False cannot be converted: only"),
        ({**LFM2, "conv_bias": True}, "lfm2 with conv_bias True cannot be converted: only False can"),
        ({**LFM2, "layer_types": ["conv", "linear"]}, r"layer_types \['conv', 'linear'\] cannot be"),
        ({**GEMMA3, "attn_logit_softcapping": 9.0}, "gemma3_text with attn_logit_softcapping 9.0"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "with use_bidirectional_attention"),
        ({**GEMMA3, "layer_types": ["chunked_attention"] * 26}, r"layer_types \['chunked_attention'"),
        (
            {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters of sliding_attention cannot be converted",
        ),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 5.0}}, "by kind of layer with rope_theta 5.0"),
        ({**LLAMA, "attention_bias": 1}, "has attention_bias 1, which is not true or false"),
        (GPT2Config(activation_function="silu").to_dict(), "activation_function 'silu'"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True).to_dict(), "scale_attn_by_inverse_layer_idx True"),
        (BloomConfig(apply_residual_connection_post_layernorm=True).to_dict(), "post_layernorm True"),
        ({"model_type": "deepseek_v32"}, "'deepseek_v32' cannot be converted: "),
        ({"model_type": "deepseek_v4"}, "'deepseek_v4' cannot be converted: "),
        ({"model_type": "glm_moe_dsa"}, "'glm_moe_dsa' cannot be converted: "),
        ({**DEEPSEEK_V3, "num_key_value_heads": 64}, "deepseek_v3 with num_key_value_heads 64"),
        ({**DEEPSEEK_V3, "norm_topk_prob": False}, "deepseek_v3 with norm_topk_prob False"),
        ({**HUB["glm-4.5-air"], "num_experts_per_tok": 1}, "glm4_moe with num_experts_per_tok 1, whose w"),
        ({**HUB["minimax-m2"], "attn_type_list": [0] * 62}, r"minimax_m2 with attn_type_list \[0, 0, "),
        ({**HUB["minimax-m2"], "use_routing_bias": False}, "minimax_m2 with use_routing_bias False"),
        (
            {**HUB["qwen1.5-moe-a2.7b"], "use_sliding_window": True},
            "use_sliding_window .* layer_types",
        ),
        ({**HUB["qwen3-next-80b-a3b"], "output_router_logits": True}, "qwen3_next with output_router_logits"),
        (
            Qwen3_5MoeTextConfig(norm_topk_prob=False).to_dict(),
            "qwen3_5_moe_text with norm_topk_prob False cannot be converted: only True can",
        ),
        (
            DeepseekV2Config(topk_method="noaux_tc", num_experts_per_tok=6).to_dict(),
            "deepseek_v2 with topk_method noaux_tc cannot be converted: only group_limited_greedy can",
        ),
        (StableLmConfig(qk_layernorm=True).to_dict(), "stablelm with qk_layernorm True cannot be converted"),
        (StableLmConfig(hidden_dropout=0.1).to_dict(), "stablelm with hidden_dropout 0.1 cannot be"),
        (GemmaConfig(use_bidirectional_attention=True).to_dict(), "gemma with use_bidirectional_attention"),
        (
            {**Exaone4Config().to_dict(), "sliding_window": None},
            "exaone4 with sliding_window None cannot be converted",
        ),
        (Dots1Config(**OF_ALL).to_dict(), "dots1 with norm_topk_prob False cannot be converted: only True"),
        (
            {**HYV3Config(**OF_ALL).to_dict(), "n_group": 2},
            "hy_v3 with n_group 2 cannot be converted: only 1 can",
        ),
        (
            {**AfmoeConfig(**OF_ALL).to_dict(), "sliding_window": None},
            "afmoe with sliding_window None cannot be converted",
        ),
        (AfmoeConfig(**OF_ALL, attention_bias=True).to_dict(), "afmoe with attention_bias True cannot"),
        (
            {**ExaoneMoeConfig().to_dict(), "mlp_layer_types": ["sparse", "wide"]},
            r"mlp_layer_types \['sparse', 'wide'\] cannot be converted",
        ),
        ({**SolarOpenConfig().to_dict(), "first_k_dense_replace": 1}, "with first_k_dense_replace 1 cannot"),
        (
            HunYuanMoEV1Config(num_experts=4, moe_topk=[2, 3]).to_dict(),
            r"hunyuan_v1_moe with moe_topk \[2, 3\] and num_experts 4 cannot be converted",
        ),
        (HunYuanMoEV1Config(num_experts=1, moe_topk=1).to_dict(), "moe_topk 1 and num_experts 1 cannot"),
        (Ernie4_5_MoeConfig(use_bias=True).to_dict(), "ernie4_5_moe with use_bias True cannot be converted"),
        (Ernie4_5_MoeConfig(moe_norm_min=0.1).to_dict(), "ernie4_5_moe with moe_norm_min 0.1 cannot"),
        (ApertusConfig(hidden_act="silu").to_dict(), "hidden_act 'silu' cannot be converted"),
        (
            GraniteSWAConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2).to_dict()
            | {"layer_rope_theta": [7.0, 8.0]},
            r"layer_rope_theta \[7.0, 8.0\] cannot be converted",
        ),
        (
            {**Phi3Config().to_dict(), "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "phi3 with rope_type 'linear' cannot be converted: only default",
        ),
        ({**Phi3Config().to_dict(), "rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        (CohereConfig(use_qk_norm=True).to_dict(), "cohere with use_qk_norm True cannot be converted"),
        (
            {**Cohere2Config().to_dict(), "sliding_window": None},
            "cohere2 with sliding_window None cannot be converted",
        ),
        ({**Cohere2Config().to_dict(), "rotary_pct": 0.5}, "cohere2 with rotary_pct 0.5 cannot be"),
        (NemotronConfig(hidden_act="silu").to_dict(), "hidden_act 'silu' cannot be converted"),
        ({**Starcoder2Config().to_dict(), "norm_type": "rms_norm"}, "starcoder2 with norm_type rms_norm"),
        ({**GRANITE_HYBRID, "logits_scaling": 0}, "with logits_scaling 0 cannot be converted: numbers above"),
        ({**GRANITE_HYBRID, "attention_multiplier": None}, "attention_multiplier None cannot be converted"),
        (
            {**GEMMA3, "sliding_window": None},
            "gemma3_text with sliding_window None cannot be converted: layer_types lists windows",
        ),
        (
            {**GEMMA3, "sliding_window_pattern": "LLLG", "layer_types": None},
            "sliding_window_pattern 'LLLG' cannot be converted without layer_types",
        ),
        ({"model_type": "gpt2", "vocab_size": 3}, "no n_layer or num_hidden_layers"),
    ],
)
def test_what_the_model_has_not_is_refused(hf_config, cause):
    with pytest.raises(UserError, match=cause):
        config_of(hf_config)


def test_a_published_starcoder_has_settings_that_transformers_does_not_read():
    of_15b = {"mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 1e-5}
    plain = Starcoder2Config().to_dict()
    assert config_of({**plain, **of_15b, "scale_attn_weights": True}) == config_of(plain)


@pytest.mark.parametrize(
    ("hf_config", "of_embedding", "of_blocks"),
    [
        (SeedOssConfig(), 0.0, 0.1),
        (GPT2Config(embd_pdrop=0.0), 0.0, 0.1),
        (GPTJConfig(embd_pdrop=0.1), 0.1, 0.0),
        (Phi3Config(embd_pdrop=0.3, resid_pdrop=0.2), 0.0, 0.2),  # their model never reads the first
        (Starcoder2Config(residual_dropout=0.2), 0.0, 0.2),
    ],
)
def test_dropouts_are_theirs(hf_config, of_embedding, of_blocks):
    config = config_of(hf_config.to_dict())
    assert (config.embedding_drop, config.hidden_dropout) == (of_embedding, of_blocks)
    assert (config.embedding_dropout is None) == (of_embedding == of_blocks)
    written = hf_config_of(config, recorded={"model_type": hf_config.model_type})
    assert config_of(written) == config


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"position_embedding_type": "none"},
            r"gpt2 .* position_embedding_type none \(needs learned_absolute",
        ),
        ({"activation": "swiglu"}, r"gpt2 cannot be this model: activation swiglu \(needs gelu\)"),
        ({"num_query_groups": 2}, r"num_query_groups 2 \(needs 12\)"),
        ({"position_embedding_type": "alibi"}, r"bloom .* embed_layernorm False \(needs True\)"),
        (
            {"position_embedding_type": "rope", "embed_layernorm": True},
            r"gpt_neox cannot be this model: embed_layernorm True \(needs False\)",
        ),
    ],
)
def test_mixed_models_have_no_name_there(changes, cause):
    with pytest.raises(UserError, match=cause):
        family_of(ModelConfig(**changes))
