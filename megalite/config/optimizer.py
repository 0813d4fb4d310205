"""The optimizer and the learning rate's course."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adam"]
LrDecayStyle = Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]


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
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay's iterations, instead of their number."""
    lr_warmup_init: float = 0.0
    """Learning rate that warm-up starts from."""
    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """Course of WSD's last part, the decay."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of WSD's last part, the decay."""
    weight_decay: float = 0.01
    """Decoupled weight decay, multiplied by the learning rate at each step."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient, scaled down to it; 0 turns clipping off."""
