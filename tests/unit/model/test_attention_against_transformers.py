"""Attention with sinks or gates is that of transformers: the output, and the gradient of every weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3NextConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from megalite.attention.choice import build_core
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.distributed.topology import Topology
from megalite.kernels import VisibleKeys
from megalite.model.attention import Attention
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.unit.model.test_against_transformers import InDoublePrecision

B, S, H, N, G, D = 2, 13, 24, 6, 3, 10
"""Samples, tokens, hidden size, query heads, key/value heads, head size."""
OURS = ModelConfig(
    hidden_size=H,
    num_attention_heads=N,
    num_query_groups=G,
    kv_channels=D,
    seq_length=S,
    position_embedding_type="none",
    attention_dropout=0.0,
    params_dtype="fp64",
)


def fused(theirs: nn.Module, kind: str) -> Tensor:
    """Return a tensor of their projections, with rows in our order ``[g, r + 2, d]``."""
    q, k, v = (
        getattr(getattr(theirs, f"{name}_proj"), kind).unflatten(0, (G, -1, D)) for name in ("q", "k", "v")
    )
    # With a gate, each of their query heads is followed by its gate.
    queries = [q] if q.shape[1] == N // G else [q[:, ::2], q[:, 1::2]]
    return torch.cat((*queries, k, v), dim=1).flatten(0, 2)


def attention_of(config: ModelConfig, topology: Topology) -> Attention:
    context = LayerContext(topology, torch.float64)
    return Attention(config, context, build_core(config, context), 0, config.head_specs[0])


def run(attention: Attention, x: Tensor) -> Tensor:
    """Map ``[b, s, h]`` to ``[b, s, h]``."""
    positions = PositionInfo({None: VisibleKeys()})
    y, bias, *_ = attention(x.transpose(0, 1), torch.arange(B), positions)
    return (y if bias is None else y + bias).transpose(0, 1)


def run_theirs(theirs: nn.Module, x: Tensor, rotary_dim: int) -> Tensor:
    """Run their attention without rotary positions."""
    cos = torch.ones(B, S, rotary_dim, dtype=torch.float64)
    mask = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)
    out: Tensor = theirs(x, (cos, torch.zeros_like(cos)), mask)[0]
    return out


def draw(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_sinks_are_those_of_gpt_oss(one_rank: Topology) -> None:
    theirs = GptOssAttention(
        GptOssConfig(
            **{"hidden_size": H, "num_attention_heads": N, "num_key_value_heads": G, "head_dim": D},
            **{"num_hidden_layers": 2, "attn_implementation": "eager"},
        ),
        1,
    ).double()
    check_same(
        theirs,
        attention_of(dataclasses.replace(OURS, softmax_type="learnable"), one_rank),
        D // 2,
        {**BIASES, "sinks": lambda of: of.sinks},
    )


def test_a_gate_is_that_of_qwen3_next(one_rank: Topology) -> None:
    theirs = Qwen3NextAttention(
        Qwen3NextConfig(
            **{"hidden_size": H, "num_attention_heads": N, "num_key_value_heads": G, "head_dim": D},
            **{"num_hidden_layers": 2, "attn_implementation": "eager", "attention_bias": True},
            rms_norm_eps=OURS.norm_epsilon,
        ),
        1,
    ).double()
    config = dataclasses.replace(
        OURS,
        attention_output_gate=True,
        qk_layernorm=True,
        normalization="RMSNorm",
        zero_centered_norms=True,
    )
    norms = {
        "query_norm.weight": lambda of: of.q_norm.weight,
        "key_norm.weight": lambda of: of.k_norm.weight,
    }
    with InDoublePrecision():
        check_same(theirs, attention_of(config, one_rank), D, {**BIASES, **norms})


Weights = Mapping[str, Callable[[Any], Tensor]]
"""Functions that return one of our weights from their module, by our name."""
BIASES: Weights = {
    "qkv.weight": lambda of: fused(of, "weight"),
    "qkv.bias": lambda of: fused(of, "bias"),
    "projection.weight": lambda of: of.o_proj.weight,
    "projection.bias": lambda of: of.o_proj.bias,
}


def check_same(theirs: nn.Module, ours: Attention, rotary_dim: int, pairs: Weights) -> None:
    """Check the output and all gradients with drawn weights."""
    draw(theirs, 1)
    ours.load_state_dict({name: of(theirs).detach() for name, of in pairs.items()})
    x, grad = torch.randn(2, B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out, expected = run(ours, x), run_theirs(theirs, x, rotary_dim)
    same(out, expected)
    out.backward(grad)
    expected.backward(grad)
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    for name, of in pairs.items():
        same(ours.get_parameter(name).grad, of(theirs))
