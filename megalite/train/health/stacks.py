"""The Python stacks of a process' threads."""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.folders import no_follow

_STANDARD_ERROR = 2
"""Its descriptor: what `sys.stderr` is replaced by may have none."""


def all_stacks() -> str:
    """Every thread's stack with its name and source lines, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = sorted(sys._current_frames().items(), key=lambda entry: entry[0] != main)
    return "\n".join(
        f"thread {names.get(ident, 'of torch')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in stacks
    )


def files_of_main_thread() -> list[str]:
    """The files of the functions that the main thread is in, innermost first; non-ASCII names are escaped.

    As the interpreter's own fault handler reads them: that touches no object of a thread that runs.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("ascii", "replace")
    threads = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    main = f"hread 0x{threading.main_thread().ident:016x} "
    return [name for thread in threads if main in thread for name in re.findall(r'File "([^"]*)"', thread)]


def write_stacks(path: Path) -> None:
    """Writes them to a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", opener=no_follow) as file:
        file.write(all_stacks())


@contextmanager
def stacks_on_signal() -> Iterator[None]:
    """In the block, ``kill -QUIT PID`` prints all stacks to standard error, and the process goes on.

    The handler is C and needs no lock of Python's: it answers where the watchdog's thread cannot.
    """
    faulthandler.register(signal.SIGQUIT, file=_STANDARD_ERROR, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGQUIT)
