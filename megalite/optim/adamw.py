"""AdamW's state and update on one flat group."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from megalite.config import OptimizerConfig
from megalite.optim.flat import FlatGroup


class AdamW:
    """torch's fused AdamW (Loshchilov and Hutter 2019), by its functional form.

    The class `torch.optim.AdamW` imports torch's compiler when one is made: a second and more of each rank's
    start, for a compiler that is not used.

    Attributes:
        moments: by torch's names, flat as the weights, ``[n]``.
        num_steps: updates so far, an fp32 scalar.
    """

    def __init__(self, group: FlatGroup, weight_decay: float, config: OptimizerConfig) -> None:
        self.group = group
        self.weight_decay = weight_decay
        self.config = config
        self.moments = {moment: torch.zeros_like(group.weight) for moment in ("exp_avg", "exp_avg_sq")}
        self.num_steps = torch.zeros((), dtype=torch.float32, device=group.weight.device)

    def step(self, learning_rate: float) -> None:
        """Updates the group's weights by its gradients."""
        adamw(
            params=[self.group.weight],
            grads=[self.group.grad],
            exp_avgs=[self.moments["exp_avg"]],
            exp_avg_sqs=[self.moments["exp_avg_sq"]],
            max_exp_avg_sqs=[],
            state_steps=[self.num_steps],
            fused=True,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
        )
