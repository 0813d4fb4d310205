"""The traces of all ranks as one file that Perfetto and chrome://tracing open.

The format is Google's "Trace Event Format": metadata events name a lane for each rank, complete events ("X")
lie in it by time, in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.folders import no_follow
from megalite.train.tracing.spans import Span


@dataclass(frozen=True)
class Lane:
    """One rank's spans, told in rank 0's clock.

    Attributes:
        coordinates: of the rank along pp, tp and dp.
    """

    rank: int
    coordinates: tuple[int, int, int]
    spans: Sequence[Span]

    @property
    def name(self) -> str:
        pp, tp, dp = self.coordinates
        return f"rank {self.rank} · pp {pp} tp {tp} dp {dp}"


def write_trace(path: Path, lanes: Sequence[Lane], facts: Mapping[str, Any]) -> None:
    """Writes the file, under another name until it is whole.

    Args:
        facts: told beside the events.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8", opener=no_follow) as file:
            file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(facts) + ',"traceEvents":[\n')
            for number, event in enumerate(_events(lanes)):
                file.write((",\n" if number else "") + json.dumps(event, ensure_ascii=False))
            file.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # what a full disk has cut takes up room


def _events(lanes: Sequence[Lane]) -> Iterator[dict[str, Any]]:
    origin = min((span.start for lane in lanes for span in lane.spans), default=0.0)
    yield _name("process_name", 0, {"name": "megalite"})
    for lane in lanes:
        yield _name("thread_name", lane.rank, {"name": lane.name})
        yield _name("thread_sort_index", lane.rank, {"sort_index": lane.rank})
        for span in lane.spans:
            yield _event(lane.rank, span, origin)


def _name(what: str, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": rank, "args": arguments}


def _event(rank: int, span: Span, origin: float) -> dict[str, Any]:
    # Whole nanoseconds: what ends where another begins must not overlap it by a rounding.
    start, end = (round(1e9 * (moment - origin)) for moment in (span.start, span.end))
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": 0,
        "tid": rank,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
    }
    if span.microbatch is not None:
        event["args"] = {"microbatch": span.microbatch, "chunk": span.chunk}
    return event
