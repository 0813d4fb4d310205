"""Keep the exponential moving average (EMA) of the weights beside them, sharded like the optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.optim.adamw import BucketState
from megalite.optim.ema import ema_share, swap_, update_ema_
from megalite.optim.offload import OptimizerOffload
from megalite.tensor_parallel.parameter_spec import ParameterShard


class AveragedWeights:
    """Averages of this rank's states, which can replace the weights for an evaluation.

    The host updates the averages of offloaded states together with their weights.

    Args:
        states: all states of this rank, each with an average.
        decay: decay rate of the average.
        offload: holds the first of the states that have elements; None if all states are on the device.
    """

    def __init__(
        self, states: Sequence[BucketState], decay: float, offload: OptimizerOffload | None = None
    ) -> None:
        self.states = states
        self.decay = decay
        self.offload = offload
        self._updated = [state for state in states if state.main.numel()]
        self._is_exchanged = False

    @torch.no_grad()
    def update(self, number: Tensor, is_good: Tensor) -> None:
        """Update the averages on the device after an update of the weights; the host does not wait.

        Args:
            number: number of updates so far, a scalar on the device.
            is_good: whether the weights were updated, a bool scalar on the device.
        """
        share = ema_share(number, self.decay) * is_good
        first = 0 if self.offload is None else self.offload.count
        for state in self._updated[first:]:
            update_ema_(_ema_of(state), state.main, share)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange this rank's weights and averages; a second call restores both, bit by bit.

        Rounded weights become rounded averages; otherwise weights and averages swap their values. Weights
        that other ranks own do not change.
        """
        num_swapped = 0
        for number, state in enumerate(self._updated):
            if state.rounded is None:
                swap_(state.main, _ema_of(state))
                num_swapped += self.offload is not None and number < self.offload.count
            else:
                state.rounded.copy_(state.main if self._is_exchanged else _ema_of(state))
        if self.offload is not None and num_swapped:
            self.offload.seal(("ema",))
        self._is_exchanged = not self._is_exchanged

    def shards(self) -> dict[str, ParameterShard]:
        """Return the averages for a checkpoint, by parameter, as views."""
        return {
            entry.name: state.parameter_shard(_ema_of(state), entry)
            for state in self.states
            for entry in state.entries
        }


def _ema_of(state: BucketState) -> Tensor:
    assert state.ema is not None
    return state.ema
