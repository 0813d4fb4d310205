"""Numbers of parameters, compared with the model itself on meta tensors, for any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.config.config import layers_of_stages
from megalite.config.model.model_config import layer_weights
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.plan.communication import Cluster
from megalite.plan.planned_run import PlannedRun
from megalite.plan.units import whole_model
from megalite.utils.hardware.gpus import GPUS
from tests.stages import build_stage

GPU = GPUS["a100-80"]


def run_of(model: ModelConfig, tp: int, pp: int) -> PlannedRun:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    config = Config(
        model=model, parallel=parallel, training=TrainingConfig(train_iters=1, global_batch_size=8)
    )
    cluster = Cluster(GPU, tp * pp, 8, GPU.node_gbps, GPU.network_gbps)
    return PlannedRun(config, cluster)


def _built(run: PlannedRun, rank: int) -> int:
    topology = Topology.fake(run.config.parallel.mesh, run.tp * run.pp, rank * run.tp)
    with topology as fake, torch.device("meta"):
        layers = layers_of_stages(run.config.model.num_layers, run.layers)[rank]
        stage = build_stage(run.config.model, fake, layers, seed=1, has_weights=False)
        return sum(parameter.numel() for parameter in stage.parameters())


GEMMA4 = {
    **{"num_layers": 12, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4},
    **{"full_attention_query_groups": 1, "kv_channels": 10, "full_attention_kv_channels": 16},
    **{"window_attn_skip_freq": (2,), "num_kv_shared_layers": 1, "kv_shared_ffn_hidden_size": 96},
}
MODELS = {
    "gpt": replace(PRESETS["gpt2-124m"], num_layers=4),
    "bloom": replace(PRESETS["bloom-560m"], num_layers=4),
    "llama": replace(PRESETS["llama3-8b"], num_layers=4, hidden_size=512, ffn_hidden_size=1024),
    "qwen": replace(
        PRESETS["qwen3-0.6b"], num_layers=4, hidden_size=64, num_attention_heads=8, kv_channels=10
    ),
    "olmo": replace(PRESETS["olmo2-7b"], num_layers=4, hidden_size=64, num_attention_heads=8),
    "gemma": replace(
        PRESETS["gemma3-1b"], num_layers=4, hidden_size=64, num_attention_heads=8, kv_channels=10
    ),
    "gpt-j": replace(PRESETS["gpt-j-6b"], num_layers=4, hidden_size=64, num_attention_heads=8),
    "gemma 4": replace(PRESETS["gemma4-31b"], **GEMMA4),
    "experts": replace(
        PRESETS["mixtral-8x7b"], num_layers=4, hidden_size=64, ffn_hidden_size=32, moe_layer_freq=(0, 1, 1, 0)
    ),
    "experts with biases": replace(
        PRESETS["gpt-oss-20b"], num_layers=4, hidden_size=64, ffn_hidden_size=32, num_experts=8
    ),
    "gates and sinks": replace(
        PRESETS["llama-tiny"], vocab_size=301, attention_output_gate=True, softmax_type="learnable"
    ),
    "recurrent layers": replace(
        PRESETS["llama-tiny"],
        vocab_size=301,
        recurrent_mixer="gated_delta_net",
        linear_attention_freq=(2,),
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
    "attention beside Mamba-2": replace(
        PRESETS["nemotron-h-tiny"], vocab_size=301, hybrid_override_pattern="B-B-", mamba_norm="none"
    ),
    "kimi": replace(
        PRESETS["llama-tiny"],
        **{"vocab_size": 301, "recurrent_mixer": "kimi_delta_attention", "linear_attention_freq": (2,)},
        **{"linear_key_head_dim": 8, "linear_num_key_heads": 4, "seq_length": 64},
    ),
    "gated convolutions": replace(
        PRESETS["llama-tiny"], vocab_size=301, recurrent_mixer="gated_convolution", linear_attention_freq=(2,)
    ),
    "layers with one block": replace(PRESETS["nemotron-h-tiny"], vocab_size=301),
    "latent": replace(
        PRESETS["llama-tiny"],
        **{"vocab_size": 301, "multi_latent_attention": True, "q_lora_rank": 24, "num_query_groups": None},
    ),
    "experts beside MLPs": replace(
        PRESETS["gemma4-26b-a4b"], **{**GEMMA4, "ffn_hidden_size": 40, "moe_ffn_hidden_size": 20}
    ),
    "latent experts": replace(
        PRESETS["nemotron-3-super-120b"],
        seq_length=64,  # its recurrence runs block by block of tokens
        **{"num_layers": 4, "hybrid_override_pattern": "ME*E", "hidden_size": 64, "num_experts": 8},
        **{"mamba_num_heads": 16, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16},
        **{"moe_latent_size": 24, "num_query_groups": 4, "mamba_num_groups": 4},
    ),
    "later tokens": replace(PRESETS["llama-tiny"], vocab_size=301, mtp_num_layers=2),
    "later tokens of Mamba-2": replace(
        PRESETS["nemotron-h-tiny"], vocab_size=301, hybrid_override_pattern="-*MM", mtp_num_layers=1
    ),
    "later tokens, tied": replace(
        PRESETS["llama-tiny"], vocab_size=301, mtp_num_layers=1, untie_embeddings_and_output_weights=False
    ),
    "llama with biases": replace(PRESETS["llama-tiny"], vocab_size=301, add_bias_linear=True),
}


def test_embeddings_for_layers_are_counted() -> None:
    model = replace(PRESETS["gemma4-e2b"], **GEMMA4, hidden_size_per_layer_input=12)
    for tp in (1, 2):
        run = run_of(model, tp, 1)
        assert run.ranks[0].size == _built(run, 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 4)])
def test_a_ranks_parameters_are_those_of_the_model(name: str, tp: int, pp: int) -> None:
    run = run_of(MODELS[name], tp, pp)
    for rank in range(pp):
        assert run.ranks[rank].size == _built(run, rank)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("gpt3-175b", 174.6),
        ("bloom-176b", 176.2),
        ("llama2-7b", 6.74),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("gemma4-31b", 30.7),
        ("gemma4-26b-a4b", 25.2),
    ],
)
def test_published_sizes(preset: str, billions: float) -> None:
    assert whole_model(PRESETS[preset], 1).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("olmoe-1b-7b", 6_919_161_856),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_404_352),
        ("nemotron-3-nano-30b", 31_577_937_344),
        ("nemotron-3-super-120b", 120_668_687_360),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("olmo2-7b", 7_298_617_344),
        ("olmo3-7b", 7_298_011_136),
        ("gemma2-2b", 2_614_341_888),
        ("gemma3-1b", 999_885_952),
        ("smollm3-3b", 3_075_098_624),
        ("ministral3-8b", 8_489_553_920),
        ("gemma4-e2b", 4_628_569_379),  # 2.3 billion without the table for the layers, as published
        ("gemma4-e4b", 7_463_013_418),
        ("gpt-j-6b", 6_050_882_784),
        ("pythia-6.9b", 6_857_302_016),
        ("nemotron-h-8b", 8_100_852_736),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("glm-4.5-air", 106_852_245_504),
        ("kimi-k2", 1_026_408_209_408),
        ("minimax-m2", 228_689_748_992),
    ],
)
def test_published_counts(preset: str, parameters: int) -> None:
    # Recurrent layers run operators for each chunk of the sequence, and all of them are recorded.
    model = replace(PRESETS[preset], make_vocab_size_divisible_by=1, seq_length=64)
    assert whole_model(model, 1).num_parameters == parameters


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("qwen1.5-moe-a2.7b", 2.69),
        ("qwen3-next-80b-a3b", 3.87),
        ("glm-4.5-air", 13.42),
        ("kimi-k2", 32.86),
        ("minimax-m2", 11.03),
        ("deepseek-v3", 37.55),
    ],
)
def test_parameters_of_a_token(preset: str, billions: float) -> None:
    """Published are 2.7, 3, 12, 32, 10 and 37; some of these do not count the tables of the vocabulary."""
    model = PRESETS[preset]
    others = sum(
        layer_weights(model, spec) - layer_weights(model, spec, active=True) for spec in model.layer_specs
    )
    whole = whole_model(replace(model, make_vocab_size_divisible_by=1, seq_length=64), 1)
    active = whole.num_parameters - others
    assert active / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_is_its_stages(name: str) -> None:
    model = replace(MODELS[name], untie_embeddings_and_output_weights=True)
    run = run_of(model, 1, 4)
    whole = whole_model(model, 1).num_parameters + run.units.tied_size  # two stages use that table
    assert sum(run.ranks[rank].size for rank in range(4)) == whole
