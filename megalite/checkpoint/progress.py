"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """All that a resumed run must know besides its tensors: data order and learning rate follow from it."""

    iteration: int = 0
    consumed_samples: int = 0

    def after(self, num_samples: int) -> Progress:
        """The progress one iteration of `num_samples` samples later."""
        return Progress(self.iteration + 1, self.consumed_samples + num_samples)
