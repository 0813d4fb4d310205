"""Draw a schedule's timeline as text: one row per rank, time to the right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from string import ascii_lowercase

from megalite.pipeline.schedules import SCHEDULES, Action, ActionKind, ScheduleName
from megalite.pipeline.simulator import Timeline, TimelineSlot, simulate_schedule

LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUT: "B",
    ActionKind.BACKWARD_WEIGHT: "W",
}
FILLS = {
    ActionKind.FORWARD: " ",
    ActionKind.BACKWARD: "=",
    ActionKind.BACKWARD_INPUT: " ",
    ActionKind.BACKWARD_WEIGHT: " ",
}


def timeline_of(
    schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None
) -> Timeline:
    """Return the timeline to draw: a forward takes one unit, a backward two, or one for each part."""
    return simulate_schedule(
        schedule, num_ranks, num_microbatches, num_chunks, lambda rank, action: action.kind.units
    )


def draw(schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> str:
    """Draw a schedule under a title with its bubble and its peak of microbatches in flight.

    The letter after a microbatch's number is the chunk; dots are idle time.
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


def lanes(slots: Sequence[TimelineSlot]) -> Iterator[tuple[TimelineSlot, float, float]]:
    """Yield each slot with its top and height in the row, as parts of its height.

    Two actions that run together have a half each.
    """
    number_of = Counter(slot.span for slot in slots)
    seen = Counter[tuple[float, float]]()
    for slot in slots:
        yield slot, seen[slot.span] / number_of[slot.span], 1 / number_of[slot.span]
        seen[slot.span] += 1


def title(schedule: ScheduleName, num_microbatches: int, num_chunks: int, timeline: Timeline) -> str:
    """Return the title of a drawing: schedule, sizes, bubble and microbatches in flight."""
    peaks = timeline.peaks_in_flight
    ranks, held = f"{len(peaks)} stages", "microbatches"
    if num_chunks > 1:
        ranks, held = f"{len(peaks)} ranks of {num_chunks} chunks", "microbatches of a chunk"
    return (
        f"{schedule}: {ranks}, {num_microbatches} microbatches, "
        f"bubble {timeline.bubble_fraction:.1%} of the time, "
        f"at most {max(peaks)} {held} in flight (by rank: {' '.join(map(str, peaks))})"
    )


def _row(slots: Sequence[TimelineSlot], unit: int, num_chunks: int) -> str:
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
