"""Report a hang: the ranks that the others wait for, the activity of each rank, and stacks."""

from __future__ import annotations

import bdb
import json
import os
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import megalite
from megalite.distributed.axis import CHECKPOINT, DEVICE, PROFILER, STORE_BARRIER, WORLD, Wait
from megalite.pipeline.schedules import Action
from megalite.train.telemetry.timers import BATCH_GENERATOR
from megalite.utils.files import no_follow
from megalite.utils.torch_private import flight_recorder

MAX_STACKS = 3
"""Number of stacks in a report: one for each different activity of a late rank."""

STANDARD_ERROR = 2
"""File descriptor of standard error: an object that replaces `sys.stderr` may have none."""


_IMPLIED = ("forward-backward", "optimizer", BATCH_GENERATOR)
"""Timers that add nothing to the events inside them."""


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank.

    Attributes:
        stamp: increases with each status; a rank is silent if its stamp stays the same.
        num_done: number of finished iterations.
        idle: seconds without progress.
        is_stuck: whether the rank has been idle longer than it may.
        has_left: whether its training is over.
        activity: description of its open events; empty unless it is stuck.
        waits_for: ranks that it waits for; None if it does not wait, empty if it cannot know which.
        collectives: number of collectives that it has started on each axis, keyed by the axis' ranks.
        stack: stack of its main thread, as text.
    """

    rank: int
    host: str
    stamp: int
    num_done: int
    idle: float = 0.0
    is_stuck: bool = False
    has_left: bool = False
    activity: str = ""
    waits_for: tuple[int, ...] | None = None
    collectives: tuple[tuple[tuple[int, ...], int], ...] = ()
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankStatus:
        fields = json.loads(text)
        if fields["waits_for"] is not None:
            fields["waits_for"] = tuple(fields["waits_for"])
        fields["collectives"] = tuple((tuple(ranks), number) for ranks, number in fields["collectives"])
        return RankStatus(**fields)


def describe(events: Sequence[object]) -> str:
    """Describe open events, given outermost first, from the innermost to the outermost."""
    shown = [event for event in events[:-1] if event not in _IMPLIED] + list(events[-1:])
    return ", in ".join(_text(event) for event in reversed(shown)) or "in no event that ranks post"


def awaited_ranks(
    events: Sequence[object], ranks_of: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the ranks that a rank in these events waits for; see `RankStatus.waits_for`.

    Args:
        ranks_of: global ranks along each axis, by the axis' name.
    """
    innermost = events[-1] if events else None
    if isinstance(innermost, Wait):
        return ranks_of[innermost.axis] if innermost.peer is None else (innermost.peer,)
    return () if innermost == DEVICE else None


def may_take_any_time(events: Sequence[object]) -> bool:
    """Return whether a rank in these events does work of unknown length: a checkpoint or a profile.

    This is False for a rank that only waits for such work of another rank: if the other rank hangs, no rank
    makes progress.
    """
    for event in reversed(events):
        if event in (CHECKPOINT, PROFILER):
            return True
        if isinstance(event, Wait) and event.what != STORE_BARRIER:
            return False
    return False


def _text(event: object) -> str:
    if isinstance(event, Action):
        return f"{event.kind.value} of {_microbatch(event)}"
    if isinstance(event, Wait):
        of = _microbatch(event.of) if isinstance(event.of, Action) else event.of
        peer = f" {'from' if event.what.endswith('-recv') else 'to'} rank {event.peer}"
        ranks = "all ranks" if event.axis == WORLD else event.axis
        return f"{event.what}{f' of {of}' if of else ''}{'' if event.peer is None else peer} over {ranks}"
    return str(event)


def _microbatch(action: Action) -> str:
    return f"microbatch {action.microbatch}{f' of chunk {action.chunk}' if action.chunk else ''}"


def find_late_ranks(
    statuses: Mapping[int, RankStatus], silent: Collection[int]
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that the others wait for, in order, and why; none if all wait and none is behind.

    A late rank is silent, has left, or does something other than waiting. If all ranks wait, a late rank has
    started fewer collectives on an axis than its peers: it waits in another collective, or skipped one.

    Args:
        statuses: statuses of all ranks that ever posted one.
        silent: ranks that no longer post a status.
    """
    answering = [status for rank, status in sorted(statuses.items()) if rank not in silent]
    late = {status.rank for status in answering if status.has_left or status.waits_for is None}
    if late := late.union(silent):
        return tuple(sorted(late)), "the others wait, or cannot continue without them"
    if behind := sorted(_ranks_behind(answering)):
        return tuple(behind), "every rank waits, but these started fewer collectives than their peers"
    return (), "every rank waits in a collective, and none is behind: suspect the network"


def _ranks_behind(statuses: Iterable[RankStatus]) -> set[int]:
    """Return the ranks with fewer collectives on an axis than a rank that waits there."""
    counts: dict[tuple[int, ...], dict[int, tuple[int, bool]]] = defaultdict(dict)
    for status in statuses:
        for ranks, number in status.collectives:
            # With a GPU the host waits for a collective later than it starts it, and for any of them.
            counts[ranks][status.rank] = number, status.waits_for in ((), ranks)
    behind = set()
    for of_axis in counts.values():
        most = max((number for number, waits in of_axis.values() if waits), default=0)
        behind |= {rank for rank, (number, _) in of_axis.items() if number < most}
    return behind


def report(
    statuses: Mapping[int, RankStatus],
    silent: Collection[int],
    seconds: float,
    stacks: str,
    records: str | None = None,
) -> str:
    """Return the text of the report.

    Args:
        seconds: seconds since the last progress of any rank.
        stacks: location of the ranks' stacks.
        records: command that reads the ranks' last collectives, if they are written.
    """
    late, why = find_late_ranks(statuses, silent)
    who = number_ranks(late) if late else "no rank is missing"
    lines = [
        f"error: hang: no rank has made progress for {seconds:.0f} s",
        f"  did not arrive: {who} ({why})",
    ]
    lines += [f"  {line}" for line in _groups(statuses, silent, late)]
    lines.append(f"  stacks of every rank that answered: {stacks}")
    if records is not None:
        lines.append(f"  their last collectives: {records}")
    for rank, stack in _stacks(statuses, silent, late):
        lines.append(f"  stack of rank {rank}:")
        lines += [f"  {line}" for line in stack.splitlines()]
    return "\n".join(lines) + "\n"


def number_ranks(ranks: Collection[int]) -> str:
    """Format rank numbers: `rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}"


def position(status: RankStatus) -> str:
    """Format the iteration and activity of a rank: ranks at the same position have the same text."""
    if status.has_left:
        return f"has left training after iteration {status.num_done}"
    return f"iteration {status.num_done + 1}" + (f", {status.activity}" if status.activity else "")


def _groups(
    statuses: Mapping[int, RankStatus], silent: Collection[int], late: Collection[int]
) -> Iterator[str]:
    """Format one line for the ranks at each position, late ranks first."""
    groups: dict[tuple[bool, str], list[RankStatus]] = defaultdict(list)
    for rank in sorted({*statuses, *silent}):
        status = statuses.get(rank)
        if status is None:
            text = "did not answer, and never has"
        elif rank in silent:
            text = f"did not answer; last status: {position(status)}, on {status.host}"
        else:
            text = position(status)
        groups[rank not in late, text].append(status or RankStatus(rank, "", 0, 0))
    for (is_on_time, text), members in sorted(groups.items(), key=lambda group: group[0][0]):
        line = f"{number_ranks([status.rank for status in members])}: {text}"
        if members[0].rank not in silent and not members[0].has_left:
            line += f" for {max(status.idle for status in members):.0f} s"
            if not is_on_time:
                line += f", on {', '.join(sorted({status.host for status in members})[:8])}"
        yield line


def _stacks(
    statuses: Mapping[int, RankStatus], silent: Collection[int], late: Collection[int]
) -> list[tuple[int, str]]:
    """Return the stack of one late rank per position, or any stack if no rank is late."""
    found: dict[str, tuple[int, str]] = {}
    for rank in sorted(late or statuses):
        status = statuses.get(rank)
        if rank not in silent and status is not None and status.stack:
            found.setdefault(position(status), (rank, status.stack))
    return list(found.values())[: MAX_STACKS if late else 1]


def all_stacks() -> str:
    """Format every thread's stack with its name and source lines, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = sorted(sys._current_frames().items(), key=lambda entry: entry[0] != main)
    return "\n".join(
        f"thread {names.get(ident, 'of torch')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in stacks
    )


def main_stack() -> str:
    """Format the main thread's stack, or that of autograd's thread if the main thread waits for it.

    Backward on a GPU runs in a thread of autograd.
    """
    frames = sys._current_frames()
    found = frames.get(threading.main_thread().ident or 0)
    if found is not None and found.f_code.co_name == "_engine_run_backward":
        known = {thread.ident for thread in threading.enumerate()}
        package = str(Path(megalite.__file__).parent)
        for ident, frame in frames.items():
            if ident not in known and any(file.startswith(package) for file in _files(frame)):
                found = frame
    return "".join(traceback.format_stack(found)) if found is not None else ""


def in_debugger() -> bool:
    """Return whether the main thread is in Python's debugger, which posts no event."""
    return bdb.__file__ in _files(sys._current_frames().get(threading.main_thread().ident or 0))


def write_stacks(path: Path) -> None:
    """Write all stacks to a file; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", opener=no_follow) as file:
        file.write(all_stacks())


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


PREFIX = "flight_recorder_"
"""Prefix of a file's name: torchfrtrace needs a prefix, and the rank at the end."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Names of torch's environment variable for the number of records: 2000 by default, 0 turns it off."""


def recorder_of(device_type: str) -> Callable[..., bytes] | None:
    """Return the function that dumps the records; None if torch lacks it, or the user has turned it off."""
    if any(os.environ.get(name) == "0" for name in _SIZES):
        return None
    return flight_recorder(device_type)


def analysis_of(folder: Path, device_type: str) -> str:
    """Return the command that reads the files in a folder. torchfrtrace cannot match gloo's records."""
    if device_type == "cuda":
        return f"torchfrtrace {folder} --prefix {PREFIX} --allow-incomplete-ranks"
    return f"python -m pickle {folder}/{PREFIX}*"


def write_records(path: Path, dump: Callable[..., bytes]) -> None:
    """Write the records to a file; create its folder.

    Stacks are not included: to look up their source lines can take torch more than ten seconds.
    """
    records = dump(includeStackTraces=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb", opener=no_follow) as file:
        file.write(records)
