"""Where a rank stands: what its main thread is at, read off the thread's frames from another thread.

To be asked only of a thread that stands still: in Python 3.11 the frame of one that runs may be half gone
when another thread gets hold of it, which ends the process.
"""

from __future__ import annotations

import bdb
import functools
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.profiler

import megalite
from megalite import meeting
from megalite.parallel import collectives
from megalite.pipeline.action import Action
from megalite.topology import WORLD, Axis

_ROOT = str(Path(megalite.__file__).parent)
_TORCH = str(torch.__path__[0])
_TORCH_DISTRIBUTED = str(Path(dist.__file__).parent)
_LOGGER = "c10d_logger.py"
"""Torch's collectives are wrapped in a function of this file."""
_AUTOGRAD_WAITS = "_engine_run_backward"
"""Where a thread stands whose backward pass runs in autograd's own, one for each GPU."""
_DEVICE_WAITS = (".item(", ".tolist(", ".cpu(", "synchronize(")
"""On a GPU the host waits here for what it has launched, collectives included."""
_WAITS, *_ANY_TIME_FILES = (
    path.encode("ascii", "backslashreplace").decode()
    for path in (
        _TORCH_DISTRIBUTED,
        f"{_ROOT}{os.sep}checkpoint{os.sep}",
        str(torch.profiler.__path__[0]),
        bdb.__file__,
    )
)
_ANY_TIME = tuple(_ANY_TIME_FILES)
_AXIS_NAMES = ("axis", "dp", "_dp", "pp", "_pp", "tp", "_tp", "_axis")


@dataclass(frozen=True)
class Place:
    """What a thread is at.

    Attributes:
        what: in words: a collective, or a function of megalite.
        line: file and line of megalite's innermost frame.
        action: the pipeline's, in words; empty outside of any.
        waits_for: ranks of the collective that it waits in, None where it waits in none; empty where it
            waits and does not say for whom.
    """

    what: str
    line: str
    action: str = ""
    waits_for: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Standing:
    """What one rank says of itself.

    Attributes:
        stamp: grows with each message: a rank whose stamp stands still is silent.
        num_done: iterations that are done.
        idle: seconds without progress.
        is_stuck: that is longer than this rank may be.
        has_left: its training is over.
        place: told where it has been idle for a while.
        collectives: started so far on each axis, by the axis' ranks: who has fewer is behind.
        stack: of its main thread, told with the place.
    """

    rank: int
    host: str
    stamp: int
    num_done: int
    idle: float = 0.0
    is_stuck: bool = False
    has_left: bool = False
    place: Place | None = None
    collectives: tuple[tuple[tuple[int, ...], int], ...] = ()
    stack: str = ""

    @staticmethod
    def of(words: dict[str, Any]) -> Standing:
        """Rebuilds one from what JSON made of it."""
        place = words["place"]
        if place is not None:
            waits_for = place["waits_for"]
            place = Place(**place | {"waits_for": None if waits_for is None else tuple(waits_for)})
        collectives = tuple((tuple(ranks), number) for ranks, number in words["collectives"])
        return Standing(**words | {"place": place, "collectives": collectives})


def frame_of_main_thread() -> FrameType | None:
    """The frame that the program's main thread is in, or that autograd's thread is in which it waits for."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    if main is not None and main.f_code.co_name == _AUTOGRAD_WAITS:
        known = {thread.ident for thread in threading.enumerate()}
        of_torch = (frame for ident, frame in frames.items() if ident not in known)
        return next((frame for frame in of_torch if any(map(_is_ours, _outward(frame)))), main)
    return main


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread in this frame waits for other ranks, as far as its frames and source lines tell."""
    for inner in _outward(frame):
        if inner.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
            return True
        if _is_ours(inner):
            if _is_meeting(inner):
                return True
            # A work's wait is C++ and has no frame: an Event's, which has one, waits for a thread.
            return inner is frame and ".wait(" in _source(inner.f_code, inner.f_lineno)
    return False


def place_of(frame: FrameType, world_size: int, *, on_gpu: bool = False) -> Place:
    """Names what a thread in this frame is at.

    Args:
        world_size: ranks of the run.
        on_gpu: the host may wait for collectives anywhere that it waits for the device.
    """
    ours = next(filter(_is_ours, _outward(frame)), None)
    callers = [each for each in _outward(frame) if not _is_of_collectives(each)] or [frame]
    caller = next(filter(_is_ours, callers), callers[0])
    line = f"{_short(caller.f_code.co_filename)}:{caller.f_lineno}"
    what, action, source = caller.f_code.co_name, _action_of(frame), _source(caller.f_code, caller.f_lineno)
    if is_waiting(frame):
        collective, axis = _collective(frame), _axis_of(ours) if ours is not None else None
        if axis is not None:
            ranks = "all ranks" if axis.name == WORLD else axis.name
            what = f"{collective or 'a message'} over {ranks} in {what}"
            return Place(what, line, action, axis.ranks)
        if collective is None and not _is_meeting(ours):
            return Place(f"a message in {what}", line, action, ())
        what = f"{collective or 'a meeting'} over all ranks in {what}"
        return Place(what, line, action, tuple(range(world_size)))
    if on_gpu and any(words in source for words in _DEVICE_WAITS):
        return Place(f"the GPU's work in {what}", line, action, ())
    return Place(what, line, action)


def takes_any_time(files: Iterable[str]) -> bool:
    """Whether a thread in functions of these files, innermost first, is at something of unknown length.

    That is reading or writing a checkpoint, writing a profiler's trace, or being debugged; to wait in a
    collective for a rank that is at it is not: that one says so itself, unless it hangs.
    """
    for file in files:
        if file.startswith(_WAITS):
            return False
        if file.startswith(_ANY_TIME):
            return True
    return False


def stack_of(frame: FrameType) -> str:
    """The stack as a traceback prints it, innermost last."""
    return "".join(traceback.format_stack(frame))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_ROOT)


def _is_meeting(frame: FrameType | None) -> bool:
    """Whether this is where ranks wait for each other in the store."""
    return frame is not None and frame.f_code.co_filename == meeting.__file__


def _is_of_collectives(frame: FrameType) -> bool:
    """Whether this is torch's code or megalite's own about collectives, which says nothing of what for."""
    return frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == collectives.__file__


def _short(path: str) -> str:
    """A file's name as seen from the repository."""
    parent = str(Path(_ROOT).parent)
    return path[len(parent) + 1 :] if path.startswith(parent) else path


@functools.cache
def _source(code: CodeType, line: int) -> str:
    return linecache.getline(code.co_filename, line)


def _collective(frame: FrameType) -> str | None:
    """The function of torch.distributed that megalite called."""
    name = None
    for inner in _outward(frame):
        if _is_ours(inner):
            break
        file = inner.f_code.co_filename
        if file.startswith(_TORCH_DISTRIBUTED) and not file.endswith(_LOGGER):
            name = inner.f_code.co_name
    return name


def _axis_of(ours: FrameType) -> Axis | None:
    """The axis that a collective runs over: one that these frames hold, or that their objects do."""
    for frame, _ in zip(filter(_is_ours, _outward(ours)), range(3), strict=False):
        if frame.f_code.co_filename.endswith(("meeting.py", "topology.py")):
            return None
        held = frame.f_locals
        holders = [held.get(name) for name in ("self", "ctx") if name in held]
        named = [held.get(name) for name in _AXIS_NAMES]
        named += [getattr(holder, name, None) for holder in holders for name in _AXIS_NAMES]
        for found in named:
            if isinstance(found, Axis):
                return found
    return None


def _action_of(frame: FrameType) -> str:
    """The pipeline's action that the frames are in."""
    for outer in filter(_is_ours, _outward(frame)):
        action = outer.f_locals.get("action")
        if isinstance(action, Action):
            chunk = f" of chunk {action.chunk}" if action.chunk else ""
            return f"{action.kind.value} of microbatch {action.microbatch}{chunk}"
    return ""
