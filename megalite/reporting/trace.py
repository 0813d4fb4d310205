"""A trace of the pipeline as a picture: a lane a rank, a box an action or a wait."""

from __future__ import annotations

import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.parsing import parse_json
from megalite.reporting.ticks import Axis, labels

_MAX_BOXES = 4000
"""Drawn at most: a longer trace is shown from its beginning."""
_WIDTH, _LEFT, _RIGHT, _LANE, _TOP = 1200, 150, 1190, 28, 6
_ITERATION = "iteration"
"""Kind of the boxes around all others in megalite's own traces."""
_COLOURS = {
    **{_ITERATION: "lane", "part": "t7", "other wait": "t9"},
    **{"forward": "t0", "backward": "t2", "backward input": "t2", "backward weight": "t6"},
    **{"pp wait": "t1", "tp wait": "t3", "dp wait": "t4", "data": "t5"},
}
"""Classes of page.css for the kinds of megalite's own traces; other kinds get them in turn."""


@dataclass(frozen=True)
class Box:
    """One event with a beginning and an end, in microseconds.

    Attributes:
        depth: boxes around it.
    """

    lane: int
    start: float
    end: float
    name: str
    kind: str
    depth: int = 0


@dataclass(frozen=True)
class Trace:
    """Boxes by start; lanes by name from the top.

    Attributes:
        verdict: the trace's own words on it, where it has some.
    """

    lanes: tuple[str, ...]
    boxes: tuple[Box, ...]
    verdict: str

    def shares(self) -> dict[str, float]:
        """Of all lanes' time what each kind took by itself, boxes within it left out; the most first."""
        if not self.boxes:
            return {}
        begin, end = min(box.start for box in self.boxes), max(box.end for box in self.boxes)
        # What lies between iterations, such as an evaluation, is in nobody's share.
        iterations = sum(box.end - box.start for box in self.boxes if box.kind == _ITERATION)
        whole = max(iterations or (end - begin) * len(self.lanes), 1e-9)
        own: dict[str, float] = defaultdict(float)
        around: dict[tuple[int, int], Box] = {}
        for box in self.boxes:
            own[box.kind] += box.end - box.start
            around[box.lane, box.depth] = box
            if box.depth:
                own[around[box.lane, box.depth - 1].kind] -= box.end - box.start
        shares = {kind: max(time, 0.0) / whole for kind, time in own.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def is_pipeline_trace(file: Path) -> bool:
    """Whether a file is called like a trace; the profiler's own of each rank are not of the pipeline."""
    name = file.name
    return "trace" in name and name.endswith((".json", ".json.gz")) and ".pt.trace." not in name


def read_trace(file: Path) -> Trace:
    """Reads Chrome's trace format: an object with `traceEvents`, or the list of them alone.

    Raises:
        UserError: it is none, or has no event with a duration.
    """
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        content = parse_json(raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"trace {file} cannot be read: {error}") from None
    about = content if isinstance(content, dict) else {}
    events = about.get("traceEvents", []) if about else content
    durations = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    if not durations:
        raise UserError(f"trace {file} has no event with a duration: give one in Chrome's trace format")
    try:
        keys = sorted({_key(event) for event in durations}, key=_order(events))
        lanes = {key: number for number, key in enumerate(keys)}
        return Trace(tuple(_lane_names(keys, events)), tuple(_boxes(durations, lanes)), _verdict(about))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise UserError(f"trace {file} has events that are not in Chrome's trace format") from None


def _key(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid", 0)), str(event.get("tid", 0))


def _order(events: Sequence[Any]) -> Any:
    """Lanes by the trace's own order, else by their numbers."""
    told = {
        (event["name"], *_key(event)): event.get("args", {}).get("sort_index", 0)
        for event in events
        if isinstance(event, dict) and event.get("ph") == "M"
    }

    def place(key: tuple[str, str]) -> tuple[Any, ...]:
        index = [
            value for (name, pid, _), value in told.items() if name == "process_sort_index" and pid == key[0]
        ]
        return *index[:1], *((len(word), word) for word in key)

    return place


def _lane_names(keys: Sequence[tuple[str, str]], events: Sequence[Any]) -> Iterator[str]:
    names: dict[tuple[str, ...], str] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M":
            pid, tid = _key(event)
            name = str(event.get("args", {}).get("name", ""))
            if event["name"] == "process_name":
                names[(pid,)] = name
            elif event["name"] == "thread_name":
                names[pid, tid] = name
    num_processes = len({pid for pid, _ in keys})
    for pid, tid in keys:
        process, thread = names.get((pid,), f"rank {pid}"), names.get((pid, tid))
        is_shared = sum(key[0] == pid for key in keys) > 1
        if num_processes == 1:
            yield thread or f"rank {tid}"
        else:
            yield f"{process} {thread or tid}" if is_shared else process


def _boxes(events: Sequence[Mapping[str, Any]], lanes: Mapping[tuple[str, str], int]) -> Iterator[Box]:
    origin = min(float(event["ts"]) for event in events)
    # At one beginning the longer one is around the shorter.
    ordered = sorted(events, key=lambda event: (float(event["ts"]), -float(event.get("dur", 0))))
    open_until: dict[int, list[float]] = defaultdict(list)
    for event in ordered:
        start, lane = float(event["ts"]) - origin, lanes[_key(event)]
        around = open_until[lane]
        while around and around[-1] <= start:
            around.pop()
        end = start + float(event.get("dur", 0))
        if not abs(start) + abs(end) < math.inf:
            raise ValueError("a time is not finite")
        name = str(event.get("name", ""))
        yield Box(lane, start, end, name, str(event.get("cat") or next(iter(name.split()), "")), len(around))
        around.append(end)


def _verdict(about: Mapping[str, Any]) -> str:
    for part in (about, about.get("otherData"), about.get("metadata")):
        told = part.get("verdict") if isinstance(part, dict) else None
        if isinstance(told, dict):
            return ", ".join(f"{name} {share:.0%}" for name, share in told.items())
        if isinstance(told, str):
            return told
    return ""


def draw_trace(trace: Trace) -> str:
    """The picture of the last iteration, all kinds with their shares, and a line on what is shown."""
    name, boxes = _last_iteration(trace)
    shown = boxes[:_MAX_BOXES]
    begin = min(box.start for box in shown)
    end, whole = (max(box.end for box in some) - begin for some in (shown, boxes))
    kinds = {
        kind: _COLOURS.get(kind, f"t{number % 10}") for number, kind in enumerate(sorted(trace.shares()))
    }
    axis = Axis(0.0, max(end, 1e-9) / 1e3, _LEFT, _RIGHT)
    bottom = _TOP + _LANE * len(trace.lanes)
    parts = [*_lanes(trace.lanes), *(_rectangle(box, begin, axis, kinds[box.kind]) for box in shown)]
    ticks = axis.ticks(10)
    for tick, text in zip(ticks, labels(ticks), strict=True):
        parts.append(f'<path class="tick" d="M{axis.place(tick):.1f} {bottom}v4"/>')
        parts.append(f'<text class="x" x="{axis.place(tick):.1f}" y="{bottom + 16}">{text}</text>')
    parts.append(f'<text class="x name" x="{_RIGHT}" y="{bottom + 29}">ms</text>')
    cut = f"the first {end / 1e3:.4g} of {whole / 1e3:.4g} ms are shown" if end < whole else ""
    return (
        f'{_legend(trace, kinds)}<svg class="trace" viewBox="0 0 {_WIDTH} {bottom + 34}" role="img" '
        f'aria-label="pipeline trace">{"".join(parts)}</svg>'
        f'<p class="note">{escape(", ".join(filter(None, (name, cut))))}</p>'
    )


def _last_iteration(trace: Trace) -> tuple[str, tuple[Box, ...]]:
    """Its name and what lies in it on all ranks; of a trace that tells of none all there is."""
    iterations = [box for box in trace.boxes if box.kind == _ITERATION]
    if not iterations:
        return "", trace.boxes
    name = max(iterations, key=lambda box: box.end).name
    same = [box for box in iterations if box.name == name]
    begin, end = min(box.start for box in same), max(box.end for box in same)
    return name, tuple(box for box in trace.boxes if begin <= box.start and box.end <= end)


def _lanes(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        top = _TOP + number * _LANE
        yield f'<rect class="lane" x="{_LEFT}" y="{top}" width="{_RIGHT - _LEFT}" height="{_LANE - 2}"/>'
        yield f'<text class="y" x="{_LEFT - 8}" y="{top + _LANE / 2 + 3}">{escape(name)}</text>'


def _rectangle(box: Box, begin: float, axis: Axis, colour: str) -> str:
    # Boxes within a box come after it and hide it, so that what is seen is what each kind took by itself.
    left, right = (axis.place((each - begin) / 1e3) for each in (box.start, box.end))
    return (
        f'<rect class="{colour}" x="{left:.2f}" y="{_TOP + box.lane * _LANE}" '
        f'width="{max(right - left, 0.3):.2f}" height="{_LANE - 2}">'
        f"<title>{escape(box.name)}: {(box.end - box.start) / 1e3:.3f} ms</title></rect>"
    )


def _legend(trace: Trace, kinds: Mapping[str, str]) -> str:
    keys = "".join(
        f'<span class="key"><i class="{kinds[kind]}"></i>{escape(kind)} {share:.1%}</span>'
        for kind, share in trace.shares().items()
    )
    idle = max(0.0, 1.0 - sum(trace.shares().values()))
    verdict = f"<p><b>{escape(trace.verdict)}</b></p>" if trace.verdict else ""
    nothing = f'<span class="key"><i class="lane"></i>nothing {idle:.1%}</span>'
    return f'{verdict}<p class="legend">{keys}{nothing}</p>'
