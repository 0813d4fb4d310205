"""Progress through JSON, and what is refused as none."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megalite.checkpoint.progress import NUM_RECENT_LOSSES, TrainingProgress


def test_comes_back_from_json_to_the_bit() -> None:
    progress = TrainingProgress(3, 24, 2, 1, (1 / 3, 5.25))
    assert TrainingProgress.from_record(json.loads(json.dumps(dataclasses.asdict(progress)))) == progress


def test_a_record_without_the_later_counts_has_none_of_them() -> None:
    assert TrainingProgress.from_record({"iteration": 3, "consumed_samples": 24}) == TrainingProgress(3, 24)


@pytest.mark.parametrize(
    "record",
    [
        {"iteration": 3},
        {"iteration": 3, "consumed_samples": "24"},
        {"iteration": 3, "consumed_samples": 24, "samples": 1},
        {"iteration": 3, "consumed_samples": 24, "recent_losses": 1.0},
        {"iteration": 3, "consumed_samples": 24, "recent_losses": ["1"]},
    ],
)
def test_what_is_no_progress(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        TrainingProgress.from_record(record)


def test_goes_on_by_iterations() -> None:
    progress = TrainingProgress().after(4).after(8, skipped=True, is_nan=True).after(8, losses=(2.5,))
    assert progress == TrainingProgress(3, 20, 1, 1, (2.5,))
    for loss in range(2 * NUM_RECENT_LOSSES):
        progress = progress.after(1, losses=(float(loss),))
    assert len(progress.recent_losses) == NUM_RECENT_LOSSES
    assert progress.recent_losses[-1] == 2 * NUM_RECENT_LOSSES - 1
