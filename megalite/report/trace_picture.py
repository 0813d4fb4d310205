"""Read a trace of the pipeline in Chrome's format, and draw it with a lane for each rank."""

from __future__ import annotations

import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.files import parse_json
from megalite.report.chart import COLOURS, base_layout

_MAX_BOXES = 4000
"""Maximum number of boxes to draw. Only the beginning of a longer trace is shown."""
_LANE = 28
"""Height of a lane in pixels."""
_ITERATION = "iteration"
"""Kind of the boxes around all others in megalite's own traces."""
_BACKGROUND = "rgba(132,144,163,0.25)"
_COLOURS = {
    **{_ITERATION: _BACKGROUND, "part": COLOURS[7], "other wait": "#8c5a3c", "forward": COLOURS[0]},
    **{"backward": COLOURS[2], "backward input": COLOURS[2], "backward weight": COLOURS[6]},
    **{
        "pp wait": COLOURS[1],
        "tp wait": COLOURS[3],
        "dp wait": COLOURS[4],
        "cp wait": COLOURS[7],
        "data": COLOURS[5],
    },
}
"""Colours of the kinds in megalite's own traces; other kinds get `COLOURS` in turn."""


@dataclass(frozen=True)
class TraceBox:
    """Describes an event with a duration; times are in microseconds.

    Attributes:
        depth: number of boxes around it.
    """

    lane: int
    start: float
    end: float
    name: str
    kind: str
    depth: int = 0


@dataclass(frozen=True)
class Trace:
    """Holds boxes ordered by start, and the names of the lanes from the top.

    Attributes:
        verdict: the time breakdown in the trace itself; empty if there is none.
    """

    lanes: tuple[str, ...]
    boxes: tuple[TraceBox, ...]
    verdict: str

    def shares(self) -> dict[str, float]:
        """Return each kind's share of all lanes' time, without boxes inside its boxes, largest first."""
        if not self.boxes:
            return {}
        begin, end = min(box.start for box in self.boxes), max(box.end for box in self.boxes)
        # Time between iterations, such as an evaluation's, does not count.
        iterations = sum(box.end - box.start for box in self.boxes if box.kind == _ITERATION)
        whole = max(iterations or (end - begin) * len(self.lanes), 1e-9)
        own: dict[str, float] = defaultdict(float)
        around: dict[tuple[int, int], TraceBox] = {}
        for box in self.boxes:
            own[box.kind] += box.end - box.start
            around[box.lane, box.depth] = box
            if box.depth:
                own[around[box.lane, box.depth - 1].kind] -= box.end - box.start
        shares = {kind: max(time, 0.0) / whole for kind, time in own.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def is_pipeline_trace(file: Path) -> bool:
    """Return whether a file has the name of a pipeline trace, rather than of a PyTorch profiler trace."""
    name = file.name
    return "trace" in name and name.endswith((".json", ".json.gz")) and ".pt.trace." not in name


def read_trace(file: Path) -> Trace:
    """Read Chrome's trace format: an object with `traceEvents`, or the list of them alone.

    Raises:
        UserError: the file is not in that format, or has no event with a duration.
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
        raise UserError(f"trace {file} has no event with a duration: pass a file in Chrome's trace format")
    try:
        metadata = [event for event in events if isinstance(event, dict) and event.get("ph") == "M"]
        keys = sorted({_key(event) for event in durations}, key=_order(metadata))
        lanes = {key: number for number, key in enumerate(keys)}
        return Trace(tuple(_lane_names(keys, metadata)), tuple(_boxes(durations, lanes)), _verdict(about))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise UserError(f"trace {file} has events that are not in Chrome's trace format") from None


def _key(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid", 0)), str(event.get("tid", 0))


def _order(metadata: Sequence[Mapping[str, Any]]) -> Callable[[tuple[str, str]], tuple[Any, ...]]:
    """Return the sort key of lanes: the trace's own order if it has one, else their numbers."""
    indices = {
        str(event.get("pid", 0)): event.get("args", {}).get("sort_index", 0)
        for event in metadata
        if event["name"] == "process_sort_index"
    }

    def sort_key(key: tuple[str, str]) -> tuple[Any, ...]:
        index = [indices[key[0]]] if key[0] in indices else []
        return *index, *((len(number), number) for number in key)

    return sort_key


def _lane_names(keys: Sequence[tuple[str, str]], metadata: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names: dict[tuple[str, ...], str] = {}
    for event in metadata:
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


def _boxes(events: Sequence[Mapping[str, Any]], lanes: Mapping[tuple[str, str], int]) -> Iterator[TraceBox]:
    origin = min(float(event["ts"]) for event in events)
    # Of two boxes that start together, the longer one is around the shorter one.
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
        yield TraceBox(
            lane, start, end, name, str(event.get("cat") or next(iter(name.split()), "")), len(around)
        )
        around.append(end)


def _verdict(about: Mapping[str, Any]) -> str:
    for part in (about, about.get("otherData"), about.get("metadata")):
        verdict = part.get("verdict") if isinstance(part, dict) else None
        if isinstance(verdict, dict):
            return ", ".join(f"{name} {share:.0%}" for name, share in verdict.items())
        if isinstance(verdict, str):
            return verdict
    return ""


def trace_figure(trace: Trace) -> tuple[dict[str, Any], list[tuple[str, str]], str]:
    """Draw the last iteration.

    Returns:
        The Plotly figure; its legend: a colour and a text for each kind; and a note on which part it shows.
    """
    name, boxes = _last_iteration(trace)
    shown = boxes[:_MAX_BOXES]
    begin = min(box.start for box in shown)
    end, whole = (max(box.end for box in some) - begin for some in (shown, boxes))
    shares = trace.shares()
    colours = {kind: _COLOURS.get(kind, COLOURS[n % len(COLOURS)]) for n, kind in enumerate(sorted(shares))}
    # Draw boxes by depth, so that inner boxes cover outer ones and each kind's own time is visible.
    groups: dict[tuple[int, str], list[TraceBox]] = defaultdict(list)
    for box in shown:
        groups[box.depth, box.kind].append(box)
    data = [
        _bars(boxes, begin) | {"marker": {"color": colours[kind]}}
        for (_, kind), boxes in sorted(groups.items(), key=lambda group: group[0])
    ]
    legend = [(colours[kind], f"{kind} {share:.1%}") for kind, share in shares.items()]
    legend.append((_BACKGROUND, f"nothing {max(0.0, 1.0 - sum(shares.values())):.1%}"))
    layout = base_layout(_LANE * len(trace.lanes) + 100, top=40) | {
        "barmode": "overlay",
        "bargap": 0.08,
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": {"title": {"text": "ms"}, "range": [0, end / 1e3], "zeroline": False, "ticks": "outside"},
        "yaxis": {
            **{"tickvals": list(range(len(trace.lanes))), "ticktext": [escape(lane) for lane in trace.lanes]},
            **{"range": [len(trace.lanes) - 0.5, -0.5], "automargin": True, "showgrid": False},
        },
    }
    cut = f"the first {end / 1e3:.4g} of {whole / 1e3:.4g} ms are shown" if end < whole else ""
    return {"data": data, "layout": layout}, legend, ", ".join(filter(None, (name, cut)))


def _bars(boxes: Sequence[TraceBox], begin: float) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "base": [(box.start - begin) / 1e3 for box in boxes],
        "x": [(box.end - box.start) / 1e3 for box in boxes],
        "y": [box.lane for box in boxes],
        "hovertext": [escape(box.name) for box in boxes],
        "hovertemplate": "%{hovertext}: %{x:.3f} ms<extra></extra>",
    }


def _last_iteration(trace: Trace) -> tuple[str, tuple[TraceBox, ...]]:
    """Return the last iteration's name and its boxes on all ranks, or all boxes if none is an iteration."""
    iterations = [box for box in trace.boxes if box.kind == _ITERATION]
    if not iterations:
        return "", trace.boxes
    name = max(iterations, key=lambda box: box.end).name
    same = [box for box in iterations if box.name == name]
    begin, end = min(box.start for box in same), max(box.end for box in same)
    return name, tuple(box for box in trace.boxes if begin <= box.start and box.end <= end)
