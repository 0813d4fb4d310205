"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

NUM_RECENT_LOSSES = 100
_MAX_COUNT = 1 << 63


@dataclass(frozen=True)
class Progress:
    """All that a resumed run must know besides its tensors: data order and schedules follow from it.

    Attributes:
        num_skipped: iterations of the whole run whose update was left out.
        num_nan: iterations of the whole run whose loss was NaN or infinite.
        recent_losses: the last ones, oldest first, that a spiky loss is told from; empty where none are.
    """

    iteration: int = 0
    consumed_samples: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    recent_losses: tuple[float, ...] = ()

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Progress:
        """The progress that `dataclasses.asdict` and JSON made this of; a missing count is 0.

        Raises:
            ValueError: it is no progress.
        """
        names = {field.name for field in fields(Progress)}
        losses = record.get("recent_losses", [])
        counts = {name: count for name, count in record.items() if name != "recent_losses"}
        if (
            not {"iteration", "consumed_samples"} <= record.keys() <= names
            or not all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts.values())
            or not isinstance(losses, list | tuple)
            or not all(isinstance(loss, float) for loss in losses)
        ):
            raise ValueError("run.json is damaged: its progress is none")
        return Progress(**counts, recent_losses=tuple(losses))

    def after(
        self,
        num_samples: int,
        *,
        skipped: bool = False,
        is_nan: bool = False,
        losses: tuple[float, ...] = (),
    ) -> Progress:
        """The progress one iteration of `num_samples` samples later.

        Args:
            skipped: its update was left out.
            is_nan: its loss was NaN or infinite.
            losses: its loss, where it is one to tell later ones by.
        """
        return Progress(
            self.iteration + 1,
            self.consumed_samples + num_samples,
            self.num_skipped + skipped,
            self.num_nan + is_nan,
            (self.recent_losses + losses)[-NUM_RECENT_LOSSES:],
        )
