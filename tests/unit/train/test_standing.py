"""What a thread is at, told from its frames."""

from __future__ import annotations

import bdb
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import megalite
from megalite.meeting import wait_for_key
from megalite.parallel.collectives import Pending
from megalite.pipeline.action import Action, Kind
from megalite.topology import Topology
from megalite.train.health.standing import Place, frame_of_main_thread, is_waiting, place_of, takes_any_time

ROOT = Path(megalite.__file__).parent


def frame_in(file: str, **names: object) -> FrameType:
    """A frame of a function that stands in a file, with these names in it."""
    source = f"def function({', '.join(names)}):\n    return sys._getframe()\n"
    scope: dict[str, Any] = {"sys": sys}
    exec(compile(source, file, "exec"), scope)
    frame = scope["function"](**names)
    assert isinstance(frame, FrameType)
    return frame


def test_checkpoints_and_the_debugger_may_take_any_time() -> None:
    assert takes_any_time(["/usr/lib/python3/threading.py", str(ROOT / "checkpoint/save.py")])
    assert takes_any_time([bdb.__file__])
    assert not takes_any_time([str(ROOT / "train/step.py")])


def test_to_wait_in_a_collective_for_a_rank_that_saves_takes_no_time_of_its_own() -> None:
    collective = str(Path(dist.__file__).parent / "distributed_c10d.py")
    saver = str(ROOT / "checkpoint/saver.py")
    assert not takes_any_time([collective, saver, str(ROOT / "train/loop.py")])
    assert takes_any_time([bdb.__file__, collective, saver])


def test_the_main_threads_files_are_found_from_another(tmp_path: Path) -> None:
    """In a program of its own: of more than a hundred threads the interpreter tells the newest."""
    program = tmp_path / "program.py"
    program.write_text(
        "import threading, time\n"
        "from megalite.train.health.stacks import files_of_main_thread\n"
        "def look():\n"
        "    while files_of_main_thread() != ['elsewhere.py', __file__]:\n"
        "        time.sleep(0.001)\n"
        "    lock.release()\n"
        "lock = threading.Lock()\n"
        "lock.acquire()\n"
        "threading.Thread(target=look).start()\n"
        # The frames are the program's own: those of `threading` differ between versions of Python.
        "exec(compile('def wait():\\n    lock.acquire()', 'elsewhere.py', 'exec'))\n"
        "wait()\n"
    )
    subprocess.run([sys.executable, program], check=True, timeout=60)


def test_code_of_torchs_collectives_waits() -> None:
    folder = Path(dist.__file__).parent
    assert is_waiting(frame_in(str(folder / "distributed_c10d.py")))
    assert not is_waiting(frame_in(str(ROOT / "train/step.py")))


def test_a_place_names_the_pipelines_action(one_rank: Topology) -> None:
    frame = frame_in(str(ROOT / "pipeline/work.py"), action=Action(Kind.BACKWARD, 3, 1), axis=one_rank.dp)
    place = place_of(frame, 4)
    assert place.action == "backward of microbatch 3 of chunk 1"
    assert place.what == "function"
    assert place.line == "megalite/pipeline/work.py:2"
    assert place.waits_for is None


def test_a_thread_that_waits_in_the_store_waits_for_all_ranks() -> None:
    class Store:
        def check(self, _: object) -> bool:
            frames.append(sys._getframe())
            return True

    frames: list[FrameType] = []
    wait_for_key(Store(), "key")  # type: ignore[arg-type]
    place = place_of(frames[0], 4)
    assert place.waits_for == (0, 1, 2, 3)
    assert "over all ranks" in place.what


def test_the_main_threads_frame_is_found_from_another() -> None:
    found: list[FrameType | None] = []
    thread = threading.Thread(target=lambda: found.append(frame_of_main_thread()))
    thread.start()
    thread.join()
    assert found[0] is not None
    names = set()
    frame: FrameType | None = found[0]
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    assert "test_the_main_threads_frame_is_found_from_another" in names


def test_the_axis_is_found_in_what_waits(one_rank: Topology) -> None:
    class Work:
        def wait(self) -> None:
            frame = sys._getframe().f_back
            assert frame is not None
            places.append(place_of(frame, 4))

    places: list[Place] = []
    Pending(torch.zeros(1), Work(), one_rank.tp).wait()  # type: ignore[arg-type]
    assert places[0].waits_for == one_rank.tp.ranks
    assert places[0].what == "a message over tp in test_the_axis_is_found_in_what_waits"
