"""Compute the model FLOPs of tokens by the conventions in use, and the weights of layers."""

from __future__ import annotations

from megalite.config.model.attention import AttentionSpec
from megalite.config.model.layers import LayerSpec
from megalite.config.model.model_config import ModelConfig, padded_vocab_size

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
    specs = _all_layers(model)
    attention = [spec.attention for spec in specs if spec.attention is not None]
    scores_and_context = sum(_features(spec) * mean_visible_keys(model, spec) for spec in attention)
    layers = sum(layer_weights(model, spec, active=True) for spec in specs)
    recurrences = sum(spec.recurrence.multiply_adds for spec in specs if spec.recurrence is not None)
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
    attention = [spec.attention for spec in _all_layers(model) if spec.attention is not None]
    scores = 6 * sum(
        _features(spec) * (model.seq_length - mean_visible_keys(model, spec)) for spec in attention
    )
    logits = 6 * model.hidden_size * padded_vocab_size(model, tp) * _logits_per_token(model)
    full = causal + scores
    return {"causal": causal, "full_attention": full, "hardware": (full - logits) * 4 / 3 + logits}


def mean_visible_keys(model: ModelConfig, spec: AttentionSpec) -> float:
    """Return how many keys a query sees in the mean over a sample; half of them in causal attention.

    Documents are not considered.
    """
    if not model.is_causal:
        return model.seq_length
    most = model.seq_length if spec.window is None else min(spec.window + 1, model.seq_length)
    return most - most**2 / (2 * model.seq_length)


def _features(spec: AttentionSpec) -> int:
    """Return the number of features of the query heads and of the outputs of all heads of a layer."""
    return spec.num_heads * (spec.head_dim + spec.value_dim)


def _all_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return all layers, also those of multi-token prediction."""
    return tuple(map(model.layer_spec, range(model.num_layers + model.mtp_num_layers)))


def _logits_per_token(model: ModelConfig) -> float:
    """Return how many tokens the model predicts for each token of a sample."""
    return model.predicted_share + model.mtp_num_layers


def layer_weights(model: ModelConfig, spec: LayerSpec, *, active: bool = False) -> int:
    """Return the number of elements of a layer's matrices.

    Args:
        active: count of the experts only as many as each token has.
    """
    hidden, num_halves = model.hidden_size, 3 if model.is_gated else 2
    rows = (spec.ffn_size or 0) * num_halves
    rows += 2 * (model.hidden_size_per_layer_input or 0)  # of the gate of the layer's own embedding
    mixer = 0 if spec.mixer is None else spec.mixer.num_weights(hidden)
    experts = 0 if spec.experts is None else spec.experts.num_weights(hidden, num_halves, active=active)
    return mixer + experts + hidden * rows


def mtp_weights(model: ModelConfig) -> int:
    """Return the number of elements of the matrices of all modules of multi-token prediction."""
    layer = layer_weights(model, model.layer_spec(model.num_layers))
    return model.mtp_num_layers * (layer + 2 * model.hidden_size**2)
