"""The train steps that run on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.observe.verify.layouts import Layout

NUM_CHUNKS = {"zbv": 2, "dpv": 2}
"""Chunks of a rank in the schedules that set their number."""


@dataclass(frozen=True)
class Case:
    """Train steps of one rank of each pipeline stage.

    Attributes:
        layout: sizes of the axes, and options.
        preset: name of a model.
        options: other fields of the config.
        num_microbatches: number of microbatches on each rank.
        injected: name of an error in the code; see `injected.py`.
        num_logged: iterations of the training loop, with a log line each; 0 to train two without the loop.
    """

    layout: Layout
    preset: str
    options: Mapping[str, Any]
    num_microbatches: int
    injected: str = ""
    num_logged: int = 0

    @property
    def ranks(self) -> range:
        """Return the first rank of each pipeline stage."""
        num_ranks = self.layout.world_size
        return range(0, num_ranks, num_ranks // self.layout.size("pp"))

    @property
    def num_layers(self) -> int:
        """Return the number of layers: one for each stage, two, or as many as `options` say."""
        num_chunks = self.layout.v or NUM_CHUNKS.get(self.layout.schedule or "", 1)
        return max(self.layout.size("pp") * num_chunks, self.options.get("num_layers", 2))

    def config(self) -> Config:
        """Return the config.

        Raises:
            ConfigError: options exclude each other, or the layout.
        """
        layout, model = self.layout, PRESETS[self.preset]
        config = Config(
            model=replace(model, vocab_size=model.vocab_size or 512, params_dtype="bf16"),
            optimizer=OptimizerConfig(lr=1e-3),
            data=DataConfig(mock_data=True),
            # The device cannot time GEMMs, so it cannot choose the form of their epilogues.
            training=TrainingConfig(
                train_iters=self.num_logged or 10, micro_batch_size=2, eval_iters=0, gemm_epilogues="on"
            ),
        )
        for name, value in {**self.options, "num_layers": self.num_layers}.items():
            (group,) = (each.name for each in fields(config) if hasattr(getattr(config, each.name), name))
            config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
        samples = config.training.micro_batch_size * self.num_microbatches * layout.num_sample_ranks
        return layout.apply(config, samples)


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}

HYBRID = {
    **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}


def case(layout: str | Layout = "tp1", preset: str = "gpt-tiny", **options: Any) -> Case:
    """Return a case with as many microbatches as its pipeline needs, and at least two.

    Args:
        layout: a layout, or its name; see `megalite.observe.verify.layouts`.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    num_microbatches = max(2, layout.size("pp") * (2 if layout.schedule == "dpv" else 1))
    return Case(layout, preset, options, num_microbatches)


CASES = {
    "plain": case(),
    "no dropout": case(**NO_DROPOUT),
    "fp32": case(params_dtype="fp32"),
    "fp16 with a dynamic loss scale": case(params_dtype="fp16", clip_grad=0.0),
    "fp64": case(params_dtype="fp64"),
    "fp8": case(fp8_format="hybrid", **NO_DROPOUT),
    "fp8 gathered in 8 bits": case("tp2dp2+sp+zero3", fp8_format="hybrid", fp8_param_gather=True),
    "fp8 updates gathered in 8 bits": case("tp2dp2+sp+zero1", fp8_format="hybrid", fp8_param_gather=True),
    "rounded moments": case("dp2+zero1", exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16"),
    "fp8 delayed": case("tp2", fp8_format="hybrid", fp8_recipe="delayed"),
    "fp8 delayed, gathered in 8 bits": case(
        "tp2dp2+sp+zero1", fp8_format="hybrid", fp8_recipe="delayed", fp8_param_gather=True
    ),
    "fp8 tp2": case("tp2", fp8_format="e4m3"),
    "no clipping": case(clip_grad=0.0),
    "epilogues in separate kernels": case(gemm_epilogues="off"),
    "gradients accumulated by autograd": case(gradient_accumulation_fusion=False),
    "untied embeddings": case(untie_embeddings_and_output_weights=True),
    "unfused attention": case(attention_backend="unfused"),
    "cross-entropy chunks": case("tp2+sp", cross_entropy_chunks=4),
    "MLP chunks": case("tp2+sp", mlp_chunks=4),
    "loss spikes": case(check_for_spiky_loss=True),
    "cohere": case(
        add_norm_bias=False, residual_multiplier=0.5, parallel_residual=True, parallel_shared_norm=True
    ),
    "xielu": case(
        activation="xielu",
        position_embedding_type="rope",
        qk_layernorm=True,
        qk_layernorm_after_rope=True,
        embedding_dropout=0.2,
    ),
    "bloom": case(preset="bloom-tiny", attention_dropout=0.1),
    "llama": case(preset="llama-tiny"),
    "llama tp2": case("tp2+sp", preset="llama-tiny"),
    "gemma": case(
        preset="llama-tiny",
        activation="geglu",
        norm_position="sandwich",
        zero_centered_norms=True,
        embedding_multiplier=8.0,
        attn_logit_softcapping=50.0,
        softmax_type="learnable",
        attention_output_gate=True,
        z_loss_coeff=1e-3,
        final_logit_softcapping=30.0,
        window_size=(9, 0),
        window_attn_skip_freq=(2,),
        window_rotary_base=100.0,
    ),
    "gemma 4": case(
        preset="llama-tiny",
        num_layers=4,
        qk_layernorm=True,
        window_size=(9, 0),
        window_attn_skip_freq=(2,),
        full_attention_kv_channels=32,
        full_attention_query_groups=1,
        keys_as_values="full_attention",
        num_kv_shared_layers=2,
        value_layernorm=True,
        layer_output_scale=True,
        rope_scaling="proportional",
        window_rope_scaling=False,
    ),
    "gemma 4 e2b": case(
        "tp2+sp",
        preset="llama-tiny",
        **{"norm_position": "sandwich", "activation": "geglu", "hidden_size_per_layer_input": 12},
    ),
    "nemotron-h": case(preset="nemotron-h-tiny", num_layers=4),
    "nemotron-h documents pp2": case("pp2dp2", preset="nemotron-h-tiny", num_layers=4, **PACKED),
    "attention beside Mamba-2": case(
        "tp2cp2+sp",
        preset="nemotron-h-tiny",
        **{"num_layers": 2, "hybrid_override_pattern": "B-", "position_embedding_type": "rope"},
        **{"mamba_norm": "none", "mamba_multipliers": (1.5, 0.75, 1.25, 1.0, 0.5)},
        **{"mixer_multipliers": (0.5, 2.0), "mlp_multipliers": (1.5, 0.75), "activation": "swiglu"},
    ),
    "recurrence": case("tp2", preset="llama-tiny", **HYBRID),
    "kimi": case(
        "tp2cp2+sp",
        preset="llama-tiny",
        **{"recurrent_mixer": "kimi_delta_attention", "linear_attention_freq": (2,), **PACKED},
        **{"linear_key_head_dim": 8, "linear_num_key_heads": 4},
    ),
    "olmo hybrid": case(
        preset="llama-tiny",
        **{**HYBRID, "linear_num_value_heads": 2, "norm_position": "output", "linear_pre_norm": True},
        **{"linear_allow_neg_eigval": True, "linear_norm_epsilon": 1e-3, "position_embedding_type": "none"},
    ),
    "gated convolutions": case(
        "tp2cp2+p2p",
        preset="llama-tiny",
        **{"recurrent_mixer": "gated_convolution", "linear_attention_freq": (2,), **PACKED},
    ),
    "recurrence with packed documents": case(
        "tp1+selective", preset="llama-tiny", recompute_modules=("core_attn",), **HYBRID, **PACKED
    ),
    "experts": case(
        "tp2+sp",
        preset="llama-tiny",
        **EXPERTS,
        moe_shared_expert_intermediate_size=32,
    ),
    "experts between stages": case("pp3", preset="llama-tiny", **EXPERTS, **PACKED),
    "stages in slices": case("pp3cp2+p2p", preset="llama-tiny", **PACKED),
    "latent attention": case(
        "tp2+sp",
        preset="llama-tiny",
        **{"multi_latent_attention": True, "q_lora_rank": 24, "num_query_groups": None, "qk_layernorm": True},
    ),
    "later tokens": case(preset="llama-tiny", mtp_num_layers=2),
    "later tokens tied tp2 pp2": case(
        "tp2pp2zb+sp", preset="llama-tiny", mtp_num_layers=1, untie_embeddings_and_output_weights=False
    ),
    "later tokens full recomputation": case("tp1+full", preset="llama-tiny", mtp_num_layers=1, **PACKED),
    "bert": case(preset="bert-tiny"),
    "bert tp2 pp2": case("tp2pp2", preset="bert-tiny"),
    "packed documents": case(**PACKED),
    "conversations": case(sft=True),
    "conversations llama pp2": case("pp2dp2", preset="llama-tiny", sft=True),
    "conversations without packing": case(sft=True, sft_packing=False),
    "window": case(window_size=(9, 0), window_attn_skip_freq=(2,)),
    "packed documents llama pp2": case("pp2dp2", preset="llama-tiny", **PACKED),
    "tensor parallel": case("tp2"),
    "sequence parallel": case("tp2+sp"),
    "context parallel": case("cp2"),
    "context parallel llama": case("tp2cp2+sp+zero1", preset="llama-tiny"),
    "exchanged heads": case("cp2+a2a", **PACKED),
    "recurrent layers in slices": case("cp2+p2p", preset="llama-tiny", **HYBRID, **PACKED),
    "ring": case("cp2+p2p"),
    "ring of exchanged heads": case("cp4+a2a+p2p"),
    "a communication type for each layer, packed documents": case(
        "cp2",
        preset="llama-tiny",
        cp_comm_type=("p2p", "a2a"),
        window_size=(9, 0),
        window_attn_skip_freq=(2,),
        **PACKED,
    ),
    "ring, packed documents": case("tp2cp2+sp+p2p", preset="llama-tiny", **PACKED),
    "full recomputation": case("tp2+sp+full"),
    "full recomputation of blocks": case("tp1+full", recompute_method="block", recompute_num_layers=1),
    "distributed saved activations": case("tp2+full", distribute_saved_activations=True),
    "recomputed attention": case("tp1+selective"),
    "recomputed modules": case("tp1+selective", recompute_modules=("layernorm", "mlp", "core_attn")),
    "recomputed activation": case("tp1+selective", recompute_modules=("mlp_act",)),
    "gpipe": case("pp3gpipe"),
    "1f1b": case("pp3"),
    "interleaved": case("pp2v2"),
    "zb-h1": case("pp3zb"),
    "zb-v": case("pp3zbv"),
    "dualpipev": case("pp2dpv"),
    "zb-v full recomputation": case("pp2zbv+full"),
    "data parallel": case("dp2", grad_communication_dtype="bf16"),
    "zero 1": case("dp2+zero1"),
    "zero 1 gathers under forward": case("dp2+zero1+gather"),
    "zero 2": case("dp2+zero2", grad_communication_dtype="bf16"),
    "zero 3": case("dp2+zero3"),
    "zero 3 fp32 tp2": case("tp2dp2+sp+zero3", params_dtype="fp32"),
    "zero 3 1f1b": case("pp2dp2+zero3"),
    "zero 3 zb-h1": case("pp2zbdp2+zero3"),
    "zero 3 kept weights": case("pp2dp2+zero3+kept"),
    "hsdp zero 1": case("dp4shard2+zero1+gather"),
    "hsdp zero 2": case("dp4shard2+zero2"),
    "hsdp zero 3": case("dp4shard2+zero3"),
    "all axes": case("tp2pp2dp2+sp+zero1+gather"),
    "offloaded activations": case("tp2", cpu_offload_activations=1),
    "offloaded activations zb-v recomputed": case("pp2zbv+selective", cpu_offload_activations=1),
    "qk-clip": case("tp2dp2+zero1", preset="llama-tiny", qk_clip=True, qk_clip_threshold=0.1),
    "averages": case("dp2+zero1", ema_decay=0.99),
    "zero 3 averages": case("dp2+zero3", ema_decay=0.99),
    "offloaded state": case("dp2+zero1", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
    "zero 3 all offloaded": case("dp2+zero3+offload"),
}
