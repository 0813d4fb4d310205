"""Record the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

NUM_RECENT_LOSSES = 100
_MAX_COUNT = 1 << 63


@dataclass(frozen=True)
class TrainingProgress:
    """State of a run in addition to its tensors; it determines data order and schedules.

    Attributes:
        num_skipped: number of iterations in the whole run whose update was skipped.
        num_nan: number of iterations in the whole run whose loss was NaN or infinite.
        recent_losses: the last losses, oldest first, with which the spike check compares; empty without the
            check.
    """

    iteration: int = 0
    consumed_samples: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    recent_losses: tuple[float, ...] = ()

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> TrainingProgress:
        """Return the progress of a record from JSON, the inverse of `asdict`; a missing count is 0.

        Raises:
            ValueError: the record is malformed.
        """
        names = {field.name for field in fields(TrainingProgress)}
        losses = record.get("recent_losses", [])
        counts = {name: count for name, count in record.items() if name != "recent_losses"}
        if (
            not {"iteration", "consumed_samples"} <= record.keys() <= names
            or not all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts.values())
            or not isinstance(losses, list | tuple)
            or not all(isinstance(loss, float) for loss in losses)
        ):
            raise ValueError("run.json is damaged: its progress is malformed")
        return TrainingProgress(**counts, recent_losses=tuple(losses))

    def after(
        self,
        num_samples: int,
        *,
        skipped: bool = False,
        is_nan: bool = False,
        losses: tuple[float, ...] = (),
    ) -> TrainingProgress:
        """Return the progress after one more iteration of `num_samples` samples.

        Args:
            skipped: whether the update was skipped.
            is_nan: whether the loss was NaN or infinite.
            losses: the loss, if later losses are compared with it.
        """
        return TrainingProgress(
            self.iteration + 1,
            self.consumed_samples + num_samples,
            self.num_skipped + skipped,
            self.num_nan + is_nan,
            (self.recent_losses + losses)[-NUM_RECENT_LOSSES:],
        )
