"""The model of megatron-core, from PyPI, as a work to be timed.

Its layers are Transformer Engine's where that imports, and its local ones elsewhere; the update is torch's
fused AdamW, in bf16 on fp32 copies of the weights, as its own optimizer keeps them. It is not meant for a
CPU. There two things stand in for a GPU: CUDA's current device, where its layers make buffers, is "cpu",
and dropout draws from torch's generator instead of its tracker's.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from one_rank_peers import adamw, adamw_on_main_weights, initial_weights, packages, training
from torch import Tensor, nn
from turns import LeftOutError, Work

from megalite.checkpoint.convert.megatron_tensors import our_name
from megalite.config import Config, ModelConfig
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
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=is_cpu)
    if not is_cpu:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    settings = TransformerConfig(**_settings(model), use_cpu_initialization=is_cpu)
    network = GPTModel(
        settings,
        _layers(model.normalization),
        vocab_size=model.padded_vocab_size(1),
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
    }


def _layers(normalization: str) -> Any:
    """Return the modules of its layers."""
    from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-untyped]
        HAVE_TE,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    if HAVE_TE:
        return get_gpt_layer_with_transformer_engine_spec()
    return get_gpt_layer_local_spec(normalization=normalization)


@torch.no_grad()
def _load(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy megalite's weights: they have the same shapes, and other names."""
    for name, parameter in network.named_parameters():
        found = our_name(name)
        assert found is not None, name
        ours, layer = found
        parameter.copy_(weights[ours.format(layer)].view_as(parameter))
