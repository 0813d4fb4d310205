"""Compute the model FLOPs of tokens by the conventions in use, and the weights of layers."""

from __future__ import annotations

from megalite.config.layer_kind import LayerKind
from megalite.config.model import ModelConfig
from megalite.config.vocab_padding import padded_vocab_size

CONVENTION = "model FLOPs, causal attention halved, recomputation not counted"
"""The convention for TFLOP/s and MFU, in plans and in training's log."""


def flops_per_token(model: ModelConfig, tp: int) -> float:
    """Return the floating-point operations of the whole model per token, forward and backward.

    By the convention of "model FLOPs", a multiply-add is two operations. Only GEMMs count, and backward
    counts twice the forward. Causal attention counts half of the scores, and with a window the scores within
    it. A recurrent layer counts its convolution, and its recurrence token by token. Of a layer's experts,
    those of one token count. Recomputation does not count. Logits count with the padded vocabulary, which
    depends on `tp`; in BERT they count for the predicted tokens only. A module of multi-token prediction
    counts as a layer, its projection and logits.
    This is the convention of Narayanan et al. 2021 (arXiv 2104.04473, appendix), without their recomputed
    forward, and with half of the attention scores as in FlashAttention-2 (arXiv 2307.08691, section 4.1).
    """
    hidden = model.hidden_size
    head = hidden * padded_vocab_size(model, tp) + (hidden * hidden if model.architecture == "bert" else 0)
    kinds = _kinds(model)
    scores_and_context = sum(
        _features(model, kind) * mean_visible_keys(model, kind) for kind in kinds if kind.mixer == "attention"
    )
    layers = sum(layer_weights(model, kind, active=True) for kind in kinds)
    of_mixers = {"gated_delta_net": model.delta_net.multiply_adds, "mamba": model.mamba.multiply_adds}
    recurrences = sum(of_mixers.get(kind.mixer, 0) for kind in kinds)
    joining = 2 * hidden * hidden * model.mtp_num_layers
    joining += hidden * (model.hidden_size_per_layer_input or 0) * model.num_layers
    multiply_adds = layers + recurrences + joining + scores_and_context + head * _logits_per_token(model)
    return 3 * 2 * multiply_adds


def flops_per_token_by_convention(model: ModelConfig, tp: int) -> dict[str, float]:
    """Return the floating-point operations per token by each convention of the literature.

    `causal` is the convention of `flops_per_token`. `full_attention` counts all scores (Korthikanti et al.
    2022). `hardware` also counts the layers' forward that full recomputation repeats, whether or not the run
    recomputes (Narayanan et al. 2021, whose formula begins with 96 B s l h^2).
    """
    causal = flops_per_token(model, tp)
    scores = 6 * sum(
        _features(model, kind) * (model.seq_length - mean_visible_keys(model, kind))
        for kind in _kinds(model)
        if kind.mixer == "attention"
    )
    logits = 6 * model.hidden_size * padded_vocab_size(model, tp) * _logits_per_token(model)
    full = causal + scores
    return {"causal": causal, "full_attention": full, "hardware": (full - logits) * 4 / 3 + logits}


def mean_visible_keys(model: ModelConfig, kind: LayerKind) -> float:
    """Return how many keys a query sees in the mean over a sample; half of them in causal attention.

    Documents are not considered. A recurrent layer has no keys to see.
    """
    if kind.mixer != "attention":
        return 0.0
    if not model.is_causal:
        return model.seq_length
    most = model.seq_length if kind.window is None else min(kind.window + 1, model.seq_length)
    return most - most**2 / (2 * model.seq_length)


def _features(model: ModelConfig, kind: LayerKind) -> int:
    """Return the number of features of the query heads and of the outputs of all heads of a layer."""
    config = model.for_kind(kind)
    return model.num_attention_heads * (config.head_dim + config.value_dim)


def _kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kinds of all layers, also of those of multi-token prediction."""
    return tuple(map(model.layer_kind, range(model.num_layers + model.mtp_num_layers)))


def _logits_per_token(model: ModelConfig) -> float:
    """Return how many tokens the model predicts for each token of a sample."""
    return model.predicted_share + model.mtp_num_layers


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
