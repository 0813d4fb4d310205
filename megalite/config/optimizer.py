"""The optimizer and the learning rate's course."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adam"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
LrDecayStyle = Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]


MAX_LOSS_SCALE = 2.0**64
"""Largest factor on the loss. Gradients that are zero for long let a dynamic factor double until it is
infinite, and an infinite one makes NaN of every later gradient and never comes down. Above this one, fp16
would hold nothing but gradients below 2**-48."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay; biases and norms are not decayed."""

    optimizer: OptimizerName = "adam"
    """The optimizer: adam is AdamW."""
    lr: float = 3e-4
    """Peak learning rate, reached at the end of warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of decay and after it."""
    lr_decay_style: LrDecayStyle = "linear"
    """Course of the learning rate from its peak to its minimum; WSD stays at the peak before it decays."""
    lr_decay_iters: int | None = None
    """Iteration at which decay ends; by default the last one."""
    lr_decay_samples: int | None = None
    """Consumed samples at which decay ends, for a run in --train-samples; by default all of them."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, for a run in --train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay's iterations or samples, instead of their number."""
    lr_warmup_init: float = 0.0
    """Learning rate that warm-up starts from."""
    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """Course of WSD's last part, the decay."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of WSD's last part, the decay."""
    lr_wsd_decay_samples: int | None = None
    """Samples of WSD's last part, for a run in --train-samples."""
    weight_decay: float = 0.01
    """Decoupled weight decay, multiplied by the learning rate at each step."""
    weight_decay_incr_style: WeightDecayStyle = "constant"
    """Course of the weight decay over the run: constant, or from a start to an end."""
    start_weight_decay: float | None = None
    """Weight decay at the run's start, with a --weight-decay-incr-style other than constant."""
    end_weight_decay: float | None = None
    """Weight decay at the run's end, likewise; at least the start's."""
    weight_decay_incr_iters: int | None = None
    """Iterations over which the weight decay comes to its end; by default all of the run."""
    weight_decay_incr_samples: int | None = None
    """Samples over which the weight decay comes to its end, for a run in --train-samples; by default all."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    loss_scale: float | None = None
    """With fp16, multiply the loss by this constant; by default by a factor that follows the gradients."""
    initial_loss_scale: float = 2.0**32
    """With fp16, the factor that the loss is multiplied by at first."""
    min_loss_scale: float = 1.0
    """With fp16, the smallest that the factor becomes."""
    loss_scale_window: int = 1000
    """With fp16, iterations in a row without overflow after which the factor doubles, up to 2**64."""
    hysteresis: int = 2
    """With fp16, overflows from which on each one halves the factor; counted anew where it doubles."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient, scaled down to it; 0 turns clipping off."""
