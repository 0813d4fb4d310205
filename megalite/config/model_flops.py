"""Compute model FLOPs by the conventions in use."""

from __future__ import annotations

from megalite.config.layer_kind import LayerKind
from megalite.config.layer_weights import layer_weights
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
