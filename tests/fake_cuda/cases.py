"""The train steps that run on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.verify.layouts import Layout

WITH_OFFLOADED_STATE = (
    "reduction by megalite/distributed/topology.py (to_host)",  # the norm, and so all gradients
    "reduction by megalite/optim/adamw.py (step)",  # whether to update, and what the host's update needs
)


@dataclass(frozen=True)
class Case:
    """Describes train steps of one rank of each pipeline stage.

    Attributes:
        layout: name of a layout; see `megalite.verify.layouts`.
        preset: name of a model.
        options: other fields of the config.
        num_microbatches: number of microbatches on each rank.
        waits: phases and functions in which the host waits for the device.
        injected: name of an error in the code; see `injected.py`.
    """

    layout: str = "tp1"
    preset: str = "gpt-tiny"
    options: Mapping[str, Any] = field(default_factory=dict)
    num_microbatches: int = 2
    waits: tuple[str, ...] = ()
    injected: str = ""

    @property
    def world_size(self) -> int:
        return Layout.parse(self.layout).world_size

    @property
    def ranks(self) -> range:
        """Return the first rank of each pipeline stage."""
        return range(0, self.world_size, self.world_size // Layout.parse(self.layout).size("pp"))

    def config(self) -> Config:
        layout, model = Layout.parse(self.layout), PRESETS[self.preset]
        config = Config(
            model=replace(model, vocab_size=model.vocab_size or 512, params_dtype="bf16"),
            optimizer=OptimizerConfig(lr=1e-3),
            data=DataConfig(mock_data=True),
            # The device cannot time GEMMs, so it cannot choose the form of their epilogues.
            training=TrainingConfig(train_iters=10, micro_batch_size=2, eval_iters=0, gemm_epilogues="on"),
        )
        for name, value in self.options.items():
            (group,) = (each.name for each in fields(config) if hasattr(getattr(config, each.name), name))
            config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
        samples = config.training.micro_batch_size * self.num_microbatches * layout.num_sample_ranks
        return layout.apply(config, samples)


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
TWO_LAYERS = {"num_layers": 2}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}

HYBRID = {
    **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}


def _small(layout: str = "tp1", preset: str = "gpt-tiny", **options: Any) -> Case:
    return Case(layout, preset, TWO_LAYERS | options)


def _deep(layout: str) -> Case:
    """Return a case of four pipeline ranks, two of them between the first stage and the last."""
    return Case(layout, options={"num_layers": 8}, num_microbatches=8 if "dpv" in layout else 4)


CASES = {
    "plain": _small(),
    "no dropout": _small(**NO_DROPOUT),
    "fp32": _small(params_dtype="fp32"),
    "fp16 with a dynamic loss scale": _small(params_dtype="fp16", clip_grad=0.0),
    "fp64": _small(params_dtype="fp64"),
    "fp8": _small(fp8_format="hybrid", **NO_DROPOUT),
    "fp8 tp2": _small("tp2", fp8_format="e4m3"),
    "no clipping": _small(clip_grad=0.0),
    "epilogues in separate kernels": _small(gemm_epilogues="off"),
    "gradients accumulated by autograd": _small(gradient_accumulation_fusion=False),
    "untied embeddings": _small(untie_embeddings_and_output_weights=True),
    "unfused attention": _small(attention_backend="unfused"),
    "cross-entropy chunks": _small("tp2+sp", cross_entropy_chunks=4),
    "MLP chunks": _small("tp2+sp", mlp_chunks=4),
    "loss spikes": _small(check_for_spiky_loss=True),
    "bloom": _small(preset="bloom-tiny", attention_dropout=0.1),
    "llama": _small(preset="llama-tiny"),
    "llama tp2": _small("tp2+sp", preset="llama-tiny"),
    "gemma": _small(
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
    "gemma 4": _small(
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
    "gemma 4 e2b": _small(
        "tp2+sp",
        preset="llama-tiny",
        **{"norm_position": "sandwich", "activation": "geglu", "hidden_size_per_layer_input": 12},
    ),
    "nemotron-h": Case(preset="nemotron-h-tiny"),
    "nemotron-h documents pp2": Case("pp2dp2", preset="nemotron-h-tiny", options=PACKED),
    "recurrence": _small("tp2", preset="llama-tiny", **HYBRID),
    "recurrence with packed documents": _small(
        "tp1+selective", preset="llama-tiny", recompute_modules=("core_attn",), **HYBRID, **PACKED
    ),
    "experts": _small(
        "tp2+sp",
        preset="llama-tiny",
        **EXPERTS,
        moe_shared_expert_intermediate_size=32,
    ),
    "experts between stages": Case("pp4", "llama-tiny", {**EXPERTS, **PACKED}, num_microbatches=4),
    "stages in slices": Case("pp4cp2+p2p", "llama-tiny", PACKED, num_microbatches=4),
    "latent attention": _small(
        "tp2+sp",
        preset="llama-tiny",
        **{"multi_latent_attention": True, "q_lora_rank": 24, "num_query_groups": None, "qk_layernorm": True},
    ),
    "later tokens": _small(preset="llama-tiny", mtp_num_layers=2),
    "later tokens tied tp2 pp2": _small(
        "tp2pp2zb+sp", preset="llama-tiny", mtp_num_layers=1, untie_embeddings_and_output_weights=False
    ),
    "later tokens full recomputation": _small("tp1+full", preset="llama-tiny", mtp_num_layers=1, **PACKED),
    "bert": _small(preset="bert-tiny"),
    "bert tp2 pp2": _small("tp2pp2", preset="bert-tiny"),
    "packed documents": _small(**PACKED),
    "conversations": _small(sft=True),
    "conversations llama pp2": _small("pp2dp2", preset="llama-tiny", sft=True),
    "conversations without packing": _small(sft=True, sft_packing=False),
    "window": _small(window_size=(9, 0), window_attn_skip_freq=(2,)),
    "packed documents llama pp2": _small("pp2dp2", preset="llama-tiny", **PACKED),
    "tensor parallel": _small("tp2"),
    "sequence parallel": _small("tp2+sp"),
    "context parallel": _small("cp2"),
    "context parallel llama": _small("tp2cp2+sp+zero1", preset="llama-tiny"),
    "exchanged heads": _small("cp2+a2a", **PACKED),
    "recurrent layers in slices": _small("cp2+p2p", preset="llama-tiny", **HYBRID, **PACKED),
    "ring": _small("cp2+p2p"),
    "ring of exchanged heads": _small("cp4+a2a+p2p"),
    "a communication type for each layer, packed documents": _small(
        "cp2",
        preset="llama-tiny",
        cp_comm_type=("p2p", "a2a"),
        window_size=(9, 0),
        window_attn_skip_freq=(2,),
        **PACKED,
    ),
    "ring, packed documents": _small("tp2cp2+sp+p2p", preset="llama-tiny", **PACKED),
    "full recomputation": _small("tp2+sp+full"),
    "full recomputation of blocks": _small("tp1+full", recompute_method="block", recompute_num_layers=1),
    "distributed saved activations": _small("tp2+full", distribute_saved_activations=True),
    "recomputed attention": _small("tp1+selective"),
    "recomputed modules": _small("tp1+selective", recompute_modules=("layernorm", "mlp", "core_attn")),
    "recomputed activation": _small("tp1+selective", recompute_modules=("mlp_act",)),
    "gpipe": _deep("pp4gpipe"),
    "1f1b": _deep("pp4"),
    "interleaved": _deep("pp4v2"),
    "zb-h1": _deep("pp4zb"),
    "zb-v": _deep("pp4zbv"),
    "dualpipev": _deep("pp4dpv"),
    "zb-v full recomputation": Case("pp2zbv+full"),
    "data parallel": _small("dp2", grad_communication_dtype="bf16"),
    "zero 1": _small("dp2+zero1"),
    "zero 1 gathers under forward": _small("dp2+zero1+gather"),
    "zero 2": _small("dp2+zero2", grad_communication_dtype="bf16"),
    "zero 3": _small("dp2+zero3"),
    "zero 3 fp32 tp2": _small("tp2dp2+sp+zero3", params_dtype="fp32"),
    "zero 3 1f1b": _small("pp2dp2+zero3"),
    "zero 3 zb-h1": _small("pp2zbdp2+zero3"),
    "zero 3 kept weights": _small("pp2dp2+zero3+kept"),
    "hsdp zero 1": _small("dp4shard2+zero1+gather"),
    "hsdp zero 2": _small("dp4shard2+zero2"),
    "hsdp zero 3": _small("dp4shard2+zero3"),
    "all axes": _small("tp2pp2dp2+sp+zero1+gather"),
    "offloaded activations": _small("tp2", cpu_offload_activations=1),
    "offloaded activations zb-v recomputed": Case("pp2zbv+selective", options={"cpu_offload_activations": 1}),
    "qk-clip": _small("tp2dp2+zero1", preset="llama-tiny", qk_clip=True, qk_clip_threshold=0.1),
    "averages": _small("dp2+zero1", ema_decay=0.99),
    "zero 3 averages": _small("dp2+zero3", ema_decay=0.99),
    "offloaded state": replace(
        _small("dp2+zero1", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
        waits=WITH_OFFLOADED_STATE,
    ),
    "zero 3 all offloaded": replace(_small("dp2+zero3+offload"), waits=WITH_OFFLOADED_STATE),
}
