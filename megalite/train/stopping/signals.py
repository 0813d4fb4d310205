"""Signals that ask a run to stop, noted by a thread: it answers while the main one is in a collective too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megalite.cli.report import is_first_rank
from megalite.log import log
from megalite.train.stopping.requeue import RequeueNote

TEMPORARY_FAILURE = 75
"""EX_TEMPFAIL of sysexits.h: what was asked for is not done yet, and the same command will go on with it."""
INTERRUPTED = 130
"""How a shell tells of a program that Ctrl-C ended."""
STOP_SIGNALS = ("SIGINT", "SIGHUP", "SIGUSR2", "SIGUSR1", "SIGTERM")
"""Every signal that may ask for a stop; of two that ranks got, the one further on is told."""

_SAME_PRESS_SECONDS = 1.0
"""A Ctrl-C reaches a rank from the terminal, and from torchrun once more: so close together they are one."""


class StopSignals:
    """What this process was asked, and what is done about it.

    Before the run holds them a signal ends the process at once: there is nothing to save. After that it is
    noted in `received`, and the loop saves and ends. A second Ctrl-C ends the process at any time.

    Args:
        requeue: told where a process ends at once.

    Attributes:
        received: name of the last signal; None as long as none came.
        start: when the run began, by `time.monotonic`.
    """

    def __init__(self, requeue: RequeueNote) -> None:
        self.received: str | None = None
        self.start = time.monotonic()
        self._requeue = requeue
        self._held = False
        self._pressed: float | None = None

    def hold(self) -> None:
        """From now on a signal waits for the end of an iteration."""
        self._held = True

    def notice(self, name: str) -> None:
        """Acts on a signal; called from the thread that listens."""
        if name == "SIGINT":
            self._press()
        if not self._held:
            self._end_at_once(name, "before the first iteration: there is nothing to save yet")
        if self.received is None:
            log.info("received %s: stopping after this iteration", name)
        self.received = name

    def _press(self) -> None:
        now = time.monotonic()
        if self._pressed is not None and now - self._pressed > _SAME_PRESS_SECONDS:
            self._end_at_once("SIGINT", "a second time: ending without saving")
        self._pressed = self._pressed or now

    def _end_at_once(self, name: str, why: str) -> None:
        """Leaves without unwinding: the main thread may be in a collective that nobody else joins."""
        interrupted = name == "SIGINT"
        if is_first_rank():
            sys.stderr.write(f"error: received {name} {why}\n")
            sys.stderr.flush()
        if not interrupted:
            self._requeue.write(f"received {name} {why}")
        os._exit(INTERRUPTED if interrupted else TEMPORARY_FAILURE)


@contextmanager
def stop_signals(names: Sequence[str], requeue: RequeueNote) -> Iterator[StopSignals]:
    """Listens to these signals and to Ctrl-C; to none where no names are given.

    Call it on the main thread. The end of the block restores what the process did on them before. A block
    that ends with SystemExit leaves them ignored instead: Slurm and torchrun may send a second signal while
    the interpreter shuts down, and the process must still end with the status of that SystemExit.
    """
    signals = StopSignals(requeue)
    if not names:
        yield signals
        return
    numbers = {int(signal.Signals[name]): name for name in {*names, "SIGINT"}}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, _leave_to_the_thread) for number in numbers}
    for number in numbers:
        signal.siginterrupt(number, False)  # system calls of libraries go on
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_listen, args=(reader, numbers, signals), name="stop-signals", daemon=True
    )
    thread.start()
    after = {number: handler or signal.SIG_DFL for number, handler in before.items()}
    try:
        yield signals
    except SystemExit:
        after = dict.fromkeys(numbers, signal.SIG_IGN)
        raise
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in after.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Stands in the place of the system's own action; Python writes the number to the pipe besides."""


def _listen(reader: int, numbers: dict[int, str], signals: StopSignals) -> None:
    while data := os.read(reader, 64):
        for number in data:
            if number in numbers:
                signals.notice(numbers[number])
