"""A schedule's timeline as text: a row a rank, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.schedule import SCHEDULES
from megalite.pipeline.simulate import Slot, Timeline, simulate_schedule

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}
FILLS = {Kind.FORWARD: " ", Kind.BACKWARD: "=", Kind.BACKWARD_INPUT: " ", Kind.BACKWARD_WEIGHT: " "}


def timeline_of(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> Timeline:
    """The timeline that is drawn: a forward takes a unit, a backward two, each of its two parts one."""
    return simulate_schedule(
        schedule, num_ranks, num_microbatches, num_chunks, lambda rank, action: action.kind.units
    )


def draw(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> str:
    """Draws a schedule of SCHEDULES, with its bubble and its peak of microbatches in flight in the title.

    The letter behind a microbatch's number is the chunk; dots are time in which a rank waits.
    """
    timeline = timeline_of(schedule, num_ranks, num_microbatches, num_chunks)
    num_chunks = SCHEDULES[schedule].stage_map(num_ranks, num_chunks).num_chunks
    unit = max(len(_label(slot.action, num_chunks)) for row in timeline.slots for slot in row)
    margin = len(str(num_ranks - 1))
    width = int(timeline.makespan) * unit
    rows = [
        f"rank {rank:{margin}} |{_row(slots, unit, num_chunks).ljust(width, '.')}|"
        for rank, slots in enumerate(timeline.slots)
    ]
    return "\n".join([title(schedule, num_microbatches, num_chunks, timeline), *rows])


def title(schedule: str, num_microbatches: int, num_chunks: int, timeline: Timeline) -> str:
    """What the drawing shows, the share of time in which ranks wait, and what they keep for the backward."""
    peaks = timeline.peaks_in_flight
    ranks, held = f"{len(peaks)} stages", "microbatches"
    if num_chunks > 1:
        ranks, held = f"{len(peaks)} ranks of {num_chunks} chunks", "microbatches of a chunk"
    return (
        f"{schedule}: {ranks}, {num_microbatches} microbatches, "
        f"bubble {timeline.bubble_fraction:.1%} of the time, "
        f"at most {max(peaks)} {held} in flight (by rank: {' '.join(map(str, peaks))})"
    )


def _row(slots: Sequence[Slot], unit: int, num_chunks: int) -> str:
    row = ""
    for slot in slots:
        cell = _label(slot.action, num_chunks)
        row = row.ljust(int(slot.start) * unit, ".") + cell.ljust(
            slot.action.kind.units * unit, FILLS[slot.action.kind]
        )
    return row


def _label(action: Action, num_chunks: int) -> str:
    chunk = ascii_lowercase[action.chunk % len(ascii_lowercase)] if num_chunks > 1 else ""
    return f"{LETTERS[action.kind]}{action.microbatch}{chunk}"
