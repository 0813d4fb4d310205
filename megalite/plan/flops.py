"""How much arithmetic a model takes, by the conventions in use."""

from __future__ import annotations

from megalite.config import ModelConfig

CONVENTION = "model FLOPs, causal attention halved, recomputation not counted"
"""What TFLOP/s and MFU are by, here and in training's log."""


def flops_per_token(model: ModelConfig, tp: int) -> float:
    """Floating-point operations that training on one token takes, forward and backward, of the whole model.

    The convention of "model FLOPs": a multiply-add is two operations; the matrix products alone count, and
    backward counts twice the forward; causal attention counts half of its square; recomputation does not
    count; the logits count with the padded vocabulary, which `tp` decides with the config. It is the
    convention of Narayanan et al. 2021 (arXiv 2104.04473, appendix) but for the recomputed forward, and for
    attention, which is halved here as in FlashAttention-2 (arXiv 2307.08691, section 4.1).
    """
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys_and_values = 2 * model.num_kv_heads * model.head_dim
    projections = hidden * (queries + keys_and_values) + queries * hidden
    scores_and_context = 2 * queries * model.seq_length / 2
    mlp = (3 if model.activation == "swiglu" else 2) * hidden * model.ffn_size
    logits = hidden * model.padded_vocab_size(tp)
    multiply_adds = model.num_layers * (projections + scores_and_context + mlp) + logits
    return 3 * 2 * multiply_adds


def flops_per_token_by_convention(model: ModelConfig, tp: int) -> dict[str, float]:
    """The same by each way to count that papers use.

    `causal` is `flops_per_token`'s. `full_attention` counts the whole square of the scores (Korthikanti et
    al. 2022). `hardware` counts it too, and the forward of the layers that full recomputation repeats,
    whether or not there is any (Narayanan et al. 2021, whose formula begins with 96 B s l h^2).
    """
    causal = flops_per_token(model, tp)
    scores = 6 * model.num_layers * model.num_attention_heads * model.head_dim * model.seq_length
    logits = 6 * model.hidden_size * model.padded_vocab_size(tp)
    full = causal + scores
    return {"causal": causal, "full_attention": full, "hardware": (full - logits) * 4 / 3 + logits}
