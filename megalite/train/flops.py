"""How much arithmetic a model takes, and how much a GPU can do."""

from __future__ import annotations

import re

import torch

from megalite.config import ModelConfig

_PEAK_TFLOPS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"B200"}), 2250.0),
    (frozenset({"GB200"}), 2500.0),
    (frozenset({"B100"}), 1750.0),
    (frozenset({"H200", "NVL"}), 835.0),
    (frozenset({"H200"}), 989.0),
    (frozenset({"GH200"}), 989.0),
    (frozenset({"H100", "PCIE"}), 756.0),
    (frozenset({"H100", "NVL"}), 835.0),
    (frozenset({"H100"}), 989.0),
    (frozenset({"H800"}), 989.0),
    (frozenset({"H20"}), 148.0),
    (frozenset({"A100"}), 312.0),
    (frozenset({"A800"}), 312.0),
    (frozenset({"A40"}), 149.7),
    (frozenset({"A30"}), 165.0),
    (frozenset({"A10"}), 125.0),
    (frozenset({"L40S"}), 362.0),
    (frozenset({"L40"}), 181.0),
    (frozenset({"L4"}), 121.0),
    (frozenset({"MI300X"}), 1307.0),
)
"""Words of a GPU's name, and its dense bf16 TFLOP/s by the vendor's data sheet; the first row that fits."""


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


def peak_tflops(device: torch.device) -> float | None:
    """Dense bf16 TFLOP/s of a GPU by its data sheet; None for a CPU, a slice of a GPU, an unknown GPU."""
    return peak_tflops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_tflops_of(name: str) -> float | None:
    """Dense bf16 TFLOP/s of the GPU that CUDA calls `name`, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if "MIG" in words:
        return None
    return next((peak for key, peak in _PEAK_TFLOPS if key <= words), None)
