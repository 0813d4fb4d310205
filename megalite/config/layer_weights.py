"""Count the elements of a model's matrices by formula.

The planner counts the parameters of the real layers. A formula suffices for what is needed before any layer
exists: to balance stages by parameters, and for the model FLOPs of the log.
"""

from __future__ import annotations

from megalite.config.layer_kind import LayerKind
from megalite.config.model import ModelConfig


def layer_weights(model: ModelConfig, kind: LayerKind, *, active: bool = False) -> int:
    """Return the number of elements of a layer's matrices.

    Args:
        active: count of the experts only as many as each token has.
    """
    model = model.for_kind(kind)
    hidden, num_halves = model.hidden_size, 3 if model.is_gated else 2
    mixer = {
        "attention": _attention_weights(model, kind),
        "gated_delta_net": model.delta_net.num_weights(hidden),
        "mamba": model.mamba.num_weights(hidden),
        "none": 0,
    }[kind.mixer]
    rows = model.ffn_size * num_halves if kind.has_mlp else 0
    rows += 2 * (model.hidden_size_per_layer_input or 0)  # of the gate of the layer's own embedding
    if kind.has_experts:
        assert model.num_experts is not None
        count = model.moe_router_topk if active else model.num_experts
        shared = (model.moe_shared_expert_intermediate_size or 0) * num_halves + model.moe_shared_expert_gate
        of_experts = count * model.expert_ffn_size * num_halves * model.expert_hidden_size
        of_latents = 0 if model.moe_latent_size is None else 2 * model.moe_latent_size
        of_mlp = model.ffn_size * num_halves if model.moe_beside_mlp else 0
        return mixer + of_experts + hidden * (shared + model.num_experts + of_latents + of_mlp)
    return mixer + hidden * rows


def _attention_weights(model: ModelConfig, kind: LayerKind) -> int:
    """Return the number of elements of the matrices of an attention block, in a config for its kind."""
    hidden, num_heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        heads = model.num_head_groups(kind) * sum(model.group_heads(kind)) + num_heads
        return hidden * heads * model.head_dim
    queries = num_heads * model.head_dim
    of_latents = num_heads * (model.qk_head_dim + model.v_head_dim) * model.kv_lora_rank
    rows = model.kv_lora_rank + model.qk_pos_emb_head_dim + num_heads * model.v_head_dim
    if model.q_lora_rank is None:
        return of_latents + hidden * (rows + queries)
    return of_latents + model.q_lora_rank * queries + hidden * (rows + model.q_lora_rank)


def mtp_weights(model: ModelConfig) -> int:
    """Return the number of elements of the matrices of all modules of multi-token prediction."""
    layer = layer_weights(model, model.layer_kind(model.num_layers))
    return model.mtp_num_layers * (layer + 2 * model.hidden_size**2)
