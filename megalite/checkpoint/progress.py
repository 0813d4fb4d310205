"""Record the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

NUM_RECENT_LOSSES = 100
_MAX_COUNT = 1 << 63


@dataclass(frozen=True)
class TrainingProgress:
    """Hold all that a resumed run must know besides its tensors: data order and schedules follow from it.

    Attributes:
        num_skipped: iterations of the whole run whose update was skipped.
        num_nan: iterations of the whole run whose loss was NaN or infinite.
        recent_losses: the last ones, oldest first, to which a spiky loss is compared; empty if there is no
            such check.
    """

    iteration: int = 0
    consumed_samples: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    recent_losses: tuple[float, ...] = ()

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> TrainingProgress:
        """Return the progress that `dataclasses.asdict` and JSON made this record from; a missing count is 0.

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
        """Return the progress one iteration of `num_samples` samples later.

        Args:
            skipped: its update was skipped.
            is_nan: its loss was NaN or infinite.
            losses: its loss, if later ones are compared with it.
        """
        return TrainingProgress(
            self.iteration + 1,
            self.consumed_samples + num_samples,
            self.num_skipped + skipped,
            self.num_nan + is_nan,
            (self.recent_losses + losses)[-NUM_RECENT_LOSSES:],
        )
