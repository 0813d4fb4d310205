"""Attention sinks: one more logit per head in the sum of the softmax, with a value of zero.

A weight is exp(x) / (sum of exp + exp(sink)), as in GPT-OSS (OpenAI 2025, arXiv 2508.10925).
Attention with a sink is thus attention without it, times sigmoid(log of the sum - sink), and any kernel that
returns the logarithm of the sums can compute it. A backward that takes the output and these logarithms from
the forward needs no change if they include the sink.

Shapes: b samples, n query heads, s sequence, d head size.
"""

import torch
from torch import Tensor


def sink_factors(log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of the keys in each sum of exponentials with a sink, ``[b, n, s, 1]``.

    Args:
        log_sums: ``[b, n, s]``, logarithm of each query's sum over the keys alone.
        sinks: ``[n]``.
    """
    return (log_sums - sinks.to(log_sums.dtype)[:, None]).sigmoid()[..., None]


def add_sinks_(out: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Change the results of attention without sinks in place to those with sinks.

    Args:
        out: ``[b, n, s, d]``.
        log_sums, sinks: as in `sink_factors`.
    """
    out.mul_(sink_factors(log_sums, sinks))
    log_sums.copy_(torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None]))


def sinks_gradient(grad: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, ``[n]``.

    A sink has weight w = exp(sink - log_sums) and value 0, so the softmax's gradient is -w (grad . out).

    Args:
        grad: gradient of `out`.
        out, log_sums: the results with sinks.
    """
    weights = (sinks.to(log_sums.dtype)[:, None] - log_sums).exp()  # [b, n, s]
    products = (grad.to(log_sums.dtype) * out).sum(-1)
    return -(weights * products).sum((0, 2)).to(sinks.dtype)
