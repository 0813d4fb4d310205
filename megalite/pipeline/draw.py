"""A schedule's timeline as text: a row a rank, time to the right."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.pipeline.schedule import SCHEDULES, Action, Kind
from megalite.pipeline.simulate import Slot, Timeline, simulate

UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2}
"""A backward computes the gradients of its inputs and of its weights: twice the work of the forward."""

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
FILLS = {Kind.FORWARD: " ", Kind.BACKWARD: "="}


def draw(schedule: str, num_stages: int, num_microbatches: int) -> str:
    """Draws a schedule of SCHEDULES, with its bubble and its peak of microbatches in flight in the title.

    A forward is one unit wide, a backward two; dots are time in which a rank waits.
    """
    actions = [SCHEDULES[schedule](rank, num_stages, num_microbatches) for rank in range(num_stages)]
    timeline = simulate(actions, lambda rank, action: UNITS[action.kind])
    unit = 1 + len(str(num_microbatches - 1))
    margin = len(str(num_stages - 1))
    width = int(timeline.makespan) * unit
    rows = [
        f"rank {rank:{margin}} |{_row(slots, unit).ljust(width, '.')}|"
        for rank, slots in enumerate(timeline.slots)
    ]
    return "\n".join([_title(schedule, num_microbatches, timeline), *rows])


def _title(schedule: str, num_microbatches: int, timeline: Timeline) -> str:
    peaks = timeline.peaks_in_flight
    return (
        f"{schedule}: {len(peaks)} stages, {num_microbatches} microbatches, "
        f"bubble {timeline.bubble_fraction:.1%} of the time, "
        f"at most {max(peaks)} microbatches in flight (by rank: {' '.join(map(str, peaks))})"
    )


def _row(slots: Sequence[Slot], unit: int) -> str:
    row = ""
    for slot in slots:
        row = row.ljust(int(slot.start) * unit, ".") + _cell(slot.action, unit)
    return row


def _cell(action: Action, unit: int) -> str:
    text = f"{LETTERS[action.kind]}{action.microbatch}"
    return text.ljust(UNITS[action.kind] * unit, FILLS[action.kind])
