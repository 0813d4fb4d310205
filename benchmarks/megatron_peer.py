"""The model of megatron-core, from PyPI, as a work to be timed.

Its layers are Transformer Engine's where that imports, and its local ones elsewhere; the update is torch's
fused AdamW, in bf16 on fp32 copies of the weights, as its own optimizer keeps them. It is not meant for a
CPU. There two things stand in for a GPU: CUDA's current device, where its layers make buffers, is "cpu",
and dropout draws from torch's generator instead of its tracker's.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from one_rank_peers import adamw, adamw_on_main_weights, initial_weights, packages, training
from torch import Tensor, nn
from turns import LeftOutError, Work

from megalite.checkpoint.convert.megatron_model import our_name
from megalite.config import Config, ModelConfig
from megalite.config.model.model_config import padded_vocab_size
from megalite.distributed.topology import Topology
from megalite.model.stage import DTYPES

_ACTIVATIONS = {"gelu": partial(F.gelu, approximate="tanh"), "swiglu": F.silu}


def megatron(config: Config, topology: Topology) -> Work:
    """Build megatron-core's GPTModel, with its own loss."""
    warnings.simplefilter("ignore")  # of what is not installed beside it
    if topology.device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if (kind := config.model.position_embedding_type) not in ("learned_absolute", "rope"):
        raise LeftOutError(f"its GPTModel has no {kind}")
    with packages("megatron-core"):
        network = _network(config, topology)
    _load(network, initial_weights(config, topology))
    s = config.model.seq_length
    positions = torch.arange(s, device=topology.device)[None]
    is_later = torch.ones(1, 1, s, s, dtype=torch.bool, device=topology.device).triu(1)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = network(tokens, positions.expand_as(tokens), is_later, labels=labels)
        return losses.mean()

    make_update = adamw_on_main_weights if config.model.params_dtype == "bf16" else adamw
    return training(loss_of, network, config, topology, make_update)


def _network(config: Config, topology: Topology) -> nn.Module:
    from megatron.core import parallel_state, tensor_parallel  # type: ignore[import-untyped]
    from megatron.core.models.gpt import GPTModel  # type: ignore[import-untyped]
    from megatron.core.transformer import TransformerConfig  # type: ignore[import-untyped]

    model, is_cpu = config.model, topology.device.type == "cpu"
    if is_cpu:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    parallel_state.destroy_model_parallel()  # of a model that this process built before
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=is_cpu)
    if not is_cpu:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    settings = TransformerConfig(**_settings(model), use_cpu_initialization=is_cpu)
    network = GPTModel(
        settings,
        _layers(model, settings),
        vocab_size=padded_vocab_size(model, 1),
        max_sequence_length=model.num_positions,
        position_embedding_type=model.position_embedding_type,
        rotary_base=int(model.rotary_base),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
    )
    return network.to(topology.device, DTYPES[model.params_dtype])


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Return the model as megatron-core's settings."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "layernorm_epsilon": model.norm_epsilon,
        "num_query_groups": model.num_kv_heads,
        "normalization": model.normalization,
        "add_bias_linear": model.add_bias_linear,
        "gated_linear_unit": model.is_gated,
        "activation_func": _ACTIVATIONS[model.activation],
        "params_dtype": DTYPES[model.params_dtype],
        "bf16": model.params_dtype == "bf16",
        "gradient_accumulation_fusion": False,  # of Apex
        "bias_dropout_fusion": True,
        **(_expert_settings(model) if model.has_experts else {}),
    }


def _expert_settings(model: ModelConfig) -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils  # type: ignore[import-untyped]

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # it reads the name without Transformer Engine too
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
        "moe_layer_freq": [int(spec.experts is not None) for spec in model.layer_specs],
    }


def _layers(model: ModelConfig, settings: Any) -> Any:
    """Return the modules of its layers."""
    from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-untyped]
        HAVE_TE,
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    if model.has_experts:
        return get_gpt_decoder_block_spec(settings, HAVE_TE, normalization=model.normalization)
    if HAVE_TE:
        return get_gpt_layer_with_transformer_engine_spec()
    return get_gpt_layer_local_spec(normalization=model.normalization)


_OF_EXPERT = re.compile(
    r"decoder\.(layers\.\d+\.mlp)\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight"
)
_ROUTER = re.compile(r"decoder\.(layers\.\d+\.mlp\.router\.weight)")


@torch.no_grad()
def _load(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy megalite's weights: they have the same shapes, and other names."""
    for name, parameter in network.named_parameters():
        parameter.copy_(_weight(name, weights).view_as(parameter))


def _weight(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Return megalite's weight by the name that megatron-core gives to it."""
    if expert := _OF_EXPERT.fullmatch(name):
        matrix = {"fc1": "up", "fc2": "down"}[expert[3]]
        return weights[f"{expert[1]}.{matrix}.weight"][int(expert[2])]
    if router := _ROUTER.fullmatch(name):
        return weights[router[1]]
    found = our_name(name)
    assert found is not None, name
    ours, layer = found
    return weights[ours.format(layer)]
