"""Interface of changes of a model after an update."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PostStepHook(Protocol):
    """Change of the model after an update, from what the iteration's forward shows."""

    def begin(self) -> None:
        """Forget the last iteration, before the first forward of the next one."""

    def step(self, is_good: Tensor) -> None:
        """Change the model.

        Args:
            is_good: whether the weights were updated, a bool scalar on the device; otherwise nothing changes.
        """
