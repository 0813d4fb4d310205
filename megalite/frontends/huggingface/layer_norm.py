"""Models with LayerNorm and rotary positions: StarCoder 2, StableLM, Phi, Nemotron and Cohere."""

from __future__ import annotations

from dataclasses import replace

from megalite.frontends.huggingface.dense import FINAL_LAYERNORM, with_modules
from megalite.frontends.huggingface.family import VOCABULARY, modules
from megalite.frontends.huggingface.llama import LLAMA, WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import one_window, rotary, windows_with_rotation
from megalite.frontends.huggingface.settings import (
    Rule,
    activation,
    biases,
    fixed,
    hidden_dropout,
    only,
    setting,
    switch,
)

_LAYER_NORM = fixed(normalization="LayerNorm")
_SHARED_NORM = fixed(parallel_residual=True, parallel_shared_norm=True)
_ONE_NORM = tuple(module for module in LLAMA.layer if module.ours != "layers.{}.mlp_norm")
STARCODER2 = replace(
    WITHOUT_MTP,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    rules=(
        only(mlp_type="default", norm_type="layer_norm"),
        *llama_like(
            4096,
            1e-5,
            writes_head_dim=False,
            norm="norm_epsilon",
            function=activation("hidden_act", "gelu_pytorch_tanh"),
        ),
        _LAYER_NORM,
        switch("use_bias", "add_bias_linear", True),
        hidden_dropout("embedding_dropout", "residual_dropout"),
        one_window(),
    ),
    layer=with_modules(LLAMA.layer, ("mlp", "mlp.up", "mlp.c_fc"), ("mlp", "mlp.down", "mlp.c_proj")),
    tied=True,
    # Published files have them; transformers' model does not read them.
    without_effect=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "rms_norm_eps"),
        *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
    ),
)
STABLELM = replace(
    WITHOUT_MTP,
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    rules=(
        only(qk_layernorm=False, hidden_dropout=0.0),
        *llama_like(
            4096,
            1e-5,
            rotary=rotary(share=("partial_rotary_factor", 0.25)),
            writes_head_dim=False,
            norm="layer_norm_eps",
        ),
        _LAYER_NORM,
        switch("use_qkv_bias", "add_qkv_bias", False, "has_qkv_bias"),
        switch("use_parallel_residual", "parallel_residual", False),
        Rule(lambda _, fields: {"parallel_shared_norm": fields["parallel_residual"]}),
    ),
    layer=tuple(
        replace(module, only_if=lambda config: not config.parallel_shared_norm)
        if module.ours.endswith("mlp_norm")
        else module
        for module in LLAMA.layer
    ),
)
PHI = replace(
    WITHOUT_MTP,
    model_type="phi",
    architecture="PhiForCausalLM",
    rules=(
        *llama_like(
            2048,
            1e-5,
            rotary=rotary(share=("partial_rotary_factor", 0.5)),
            writes_head_dim=False,
            norm="layer_norm_eps",
            function=activation("hidden_act", "gelu_new"),
        ),
        _LAYER_NORM,
        _SHARED_NORM,
        fixed(add_bias_linear=True, add_output_bias=True),
        switch("qk_layernorm", "qk_layernorm", False),
        hidden_dropout("embd_pdrop", "resid_pdrop"),
    ),
    ends=(
        *FINAL_LAYERNORM,
        *modules("", "", ("vector", "output.bias", "lm_head.bias", VOCABULARY)),
    ),
    layer=(
        *with_modules(
            _ONE_NORM,
            ("attention_output", "attention.projection", "self_attn.dense"),
            ("mlp", "mlp.up", "mlp.fc1"),
            ("mlp", "mlp.down", "mlp.fc2"),
        ),
        *modules(
            "layers.{}.attention.",
            "model.layers.{}.self_attn.",
            ("norm", "query_norm", "q_layernorm"),
            ("norm", "key_norm", "k_layernorm"),
            only_if=lambda config: config.qk_layernorm,
        ),
    ),
)
NEMOTRON = replace(
    WITHOUT_MTP,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    rules=(
        *llama_like(
            4096,
            1e-5,
            rotary=rotary(share=("partial_rotary_factor", 0.5)),
            norm="norm_eps",
            function=activation("hidden_act", "relu2"),
        ),
        _LAYER_NORM,
        fixed(zero_centered_norms=True),
        biases(mlp=None),
    ),
    layer=with_modules(LLAMA.layer, ("mlp", "mlp.up", "mlp.up_proj")),
)


def _cohere(positions: Rule) -> tuple[Rule, ...]:
    """Return the rules of Command R with a rule of rotary positions."""
    return (
        only(use_qk_norm=False),
        *llama_like(8192, 1e-5, rotary=positions, writes_head_dim=False, norm="layer_norm_eps"),
        _LAYER_NORM,
        _SHARED_NORM,
        fixed(add_norm_bias=False, rotary_interleaved=True),
        biases(),
        setting("logit_scale", "logit_multiplier", 0.0625),
    )


COHERE = replace(
    WITHOUT_MTP,
    model_type="cohere",
    architecture="CohereForCausalLM",
    rules=_cohere(rotary(500000.0)),
    layer=_ONE_NORM,
    tied=True,
    without_effect=("model_max_length",),
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rules=(
        only(use_gated_activation=True, use_parallel_block=True, rotary_pct=1.0),
        only(position_embedding_type="rope_gptj"),
        *_cohere(rotary()),
        windows_with_rotation(4, "sliding_window_pattern"),
    ),
    # Of generation and of other programs.
    without_effect=(
        *("cache_implementation", "layer_switch", "order_of_interleaved_layers", "use_embedding_sharing"),
        "use_parallel_embedding",
    ),
)
