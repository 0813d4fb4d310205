"""Stop a run before its last iteration: signals, stop conditions, exit status, requeue note."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megalite.checkpoint.lease import FolderLease
from megalite.config import TrainingConfig
from megalite.distributed.axis import CHECKPOINT
from megalite.distributed.collectives import all_reduce, largest_of_all
from megalite.distributed.topology import Topology
from megalite.utils.commands import is_first_rank
from megalite.utils.files import no_follow
from megalite.utils.log import log

REQUEUE_FILE = "requeue"
REQUEUE_VARIABLE = "MEGALITE_REQUEUE_NOTE"


class RequeueNote:
    """The file `SAVE/requeue`, which exists from an early end to the next start and holds the reason.

    Scripts read it because torchrun exits with the same status for every failure of its workers. They can
    name another file by the variable MEGALITE_REQUEUE_NOTE of the environment.

    Args:
        folder: the run's folder; None if there is none, and on every rank but the first.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = Path(os.environ.get(REQUEUE_VARIABLE) or f"{folder}/{REQUEUE_FILE}") if folder else None

    def write(self, reason: str) -> None:
        """Write the file, or log that it cannot be written: the run ends either way."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "w", encoding="utf-8", opener=no_follow) as file:
                file.write(reason + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s)", self._file, error.strerror)

    def remove(self) -> None:
        """Delete an earlier run's file, or log that it cannot be deleted: the run continues either way."""
        if self._file is None:
            return
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s cannot be deleted (%s): a script may mistake it for this run's",
                self._file,
                error.strerror,
            )


TEMPORARY_FAILURE = 75
"""Exit status (EX_TEMPFAIL of sysexits.h): the run is not finished; the same command resumes it."""
INTERRUPTED = 130
"""Exit status that a shell reports for a program that Ctrl-C ended."""
STOP_SIGNALS = ("SIGINT", "SIGHUP", "SIGUSR2", "SIGUSR1", "SIGTERM")
"""Signals that can stop a run; if ranks receive several, the last one in this list is reported."""

_SAME_PRESS_SECONDS = 1.0
"""A rank receives Ctrl-C from the terminal and from torchrun: two within these seconds count as one."""


class StopSignals:
    """Handles the stop signals that this process receives.

    Before `hold` is called, a signal ends the process at once: there is nothing to save. After that, the
    signal is stored in `received`, and the loop saves and ends. A second Ctrl-C always ends the process.

    Args:
        requeue_note: written if a signal ends the process at once.

    Attributes:
        received: name of the last signal; None if there was none.
        start: start of the run, by `time.monotonic`.
    """

    def __init__(self, requeue_note: RequeueNote) -> None:
        self.received: str | None = None
        self.start = time.monotonic()
        self.requeue_note = requeue_note
        self._held = False
        self._pressed: float | None = None

    def hold(self) -> None:
        """Let signals wait for the end of an iteration from now on."""
        self._held = True

    def notice(self, name: str) -> None:
        """Handle a signal; called by the listening thread."""
        if name == "SIGINT":
            now = time.monotonic()
            if self._pressed is not None and now - self._pressed > _SAME_PRESS_SECONDS:
                self._end_at_once(name, "a second time: ending without saving")
            self._pressed = self._pressed or now
        if not self._held:
            self._end_at_once(name, "before the first iteration: there is nothing to save yet")
        if self.received is None:
            log.info("received %s: stopping after this iteration", name)
        self.received = name

    def _end_at_once(self, name: str, why: str) -> None:
        """Exit without unwinding: the main thread may wait in a collective that no other rank joins."""
        interrupted = name == "SIGINT"
        if is_first_rank():
            sys.stderr.write(f"error: received {name} {why}\n")
            sys.stderr.flush()
        if not interrupted:
            self.requeue_note.write(f"received {name} {why}")
        os._exit(INTERRUPTED if interrupted else TEMPORARY_FAILURE)


@contextmanager
def stop_signals(names: Sequence[str], requeue_note: RequeueNote) -> Iterator[StopSignals]:
    """Listen for these signals and for Ctrl-C in the block; do nothing if `names` is empty.

    Call it on the main thread. The end of the block restores the earlier handlers. A block that ends with
    SystemExit leaves the signals ignored instead: Slurm and torchrun may send a second one while the
    interpreter shuts down, and the process must still exit with that status.
    """
    signals = StopSignals(requeue_note)
    if not names:
        yield signals
        return
    numbers = {int(signal.Signals[name]): name for name in {*names, "SIGINT"}}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, _ignore) for number in numbers}
    for number in numbers:
        signal.siginterrupt(number, False)  # do not interrupt system calls of libraries
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


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replace the default action; Python also writes the number to the pipe, which the thread reads."""


def _listen(reader: int, numbers: dict[int, str], signals: StopSignals) -> None:
    while data := os.read(reader, 64):
        for number in data:
            if number in numbers:
                signals.notice(numbers[number])


CHECK_SECONDS = 0.25
"""Approximate seconds between two checks of the stop conditions if iterations are shorter."""
_MAX_ITERATIONS_BETWEEN_CHECKS = 100


@dataclass(frozen=True)
class Stop:
    """Decision to end a run early.

    Attributes:
        reason: a clause for the log.
        status: the process's exit status.
        wants_requeue: whether a scheduler should start the run again.
        regroups: whether the processes form a new group, and go on.
        is_urgent: whether the run must end soon; an evaluation is skipped or interrupted.
    """

    reason: str
    status: int = 0
    wants_requeue: bool = False
    regroups: bool = False
    is_urgent: bool = False


class Stopped(Exception):
    """Raised to interrupt work that an urgent stop skips."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        super().__init__(stop.reason)


@dataclass(eq=False)
class StopConditions:
    """Decides when the run must save and exit; every rank decides the same.

    Ranks agree on it after every iteration, or less often if iterations take less than `CHECK_SECONDS`.

    Args:
        lease: lease on the checkpoint folder, if there is one.
        layout_file: the file of --layout-file, if there is one.
        can_grow: returns whether this rank knows of processes with which more ranks can train.

    Attributes:
        minutes: age of the run at the last check, the same on every rank.
        has_layout_file: whether `layout_file` existed at the last check, the same on every rank.
    """

    config: TrainingConfig
    topology: Topology
    signals: StopSignals
    lease: FolderLease | None = None
    layout_file: str | None = None
    can_grow: Callable[[], bool] = lambda: False
    has_layout_file: bool = field(default=False, init=False)
    minutes: float = field(default=0.0, init=False)
    _checked_at: tuple[int, float] = field(default=(0, 0.0), init=False)  # iteration and minutes
    _iterations_between: int = field(default=1, init=False)

    def after(self, iteration: int) -> Stop | None:
        """Return why to stop after `iteration`, or None to continue."""
        if self.config.exit_interval and iteration % self.config.exit_interval == 0:
            reason = f"iteration {iteration} is a multiple of --exit-interval {self.config.exit_interval}"
            return Stop(reason, wants_requeue=True)
        last, minutes_then = self._checked_at
        if last < iteration < last + self._iterations_between:
            return None
        stop = self.now()
        # Computed from the minutes that all ranks agreed on, so that all check after the same iteration.
        seconds = 60.0 * (self.minutes - minutes_then) / max(1, iteration - last)
        self._checked_at = iteration, self.minutes
        shortest = CHECK_SECONDS / _MAX_ITERATIONS_BETWEEN_CHECKS
        self._iterations_between = max(1, int(CHECK_SECONDS / max(seconds, shortest)))
        return stop

    def now(self) -> Stop | None:
        """Return why to stop now, or None; an all-reduce of six numbers.

        Raises:
            LeaseLost: another run has taken over the checkpoint folder; raised on every rank.
        """
        config = self.config
        minutes, is_off, which, is_lost, has_layout_file, can_grow = self._agreed()
        self.minutes, self.has_layout_file = minutes, bool(has_layout_file)
        if is_lost:
            assert self.lease is not None
            raise self.lease.loss()
        if is_off:
            return Stop(f"--kill-switch-path {config.kill_switch_path} exists", is_urgent=True)
        if which:
            name = STOP_SIGNALS[int(which) - 1]
            if name == "SIGINT":
                return Stop("received SIGINT", INTERRUPTED, is_urgent=True)
            return Stop(f"received {name}", TEMPORARY_FAILURE, wants_requeue=True, is_urgent=True)
        if config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins:
            reason = f"the run is older than --exit-duration-in-mins {config.exit_duration_in_mins:g}"
            return Stop(reason, wants_requeue=True)
        if can_grow:
            return Stop("processes have joined, and the run goes on with them", regroups=True)
        return None

    def raise_if_urgent(self) -> None:
        """Interrupt the caller's work if the run must end soon.

        Raises:
            Stopped: the run must end soon; raised on every rank.
        """
        if (stop := self.now()) is not None and stop.is_urgent:
            raise Stopped(stop)

    def _agreed(self) -> list[float]:
        """Return the ranks' maxima of minutes, kill switch, signal, lost lease, layout file, `can_grow`.

        The tensor is on the host: a collective on the GPU would wait for all queued GPU work.
        """
        name = self.signals.received
        with self.topology.events.during(CHECKPOINT):  # the lease is in the folder of checkpoints
            is_lost = self.topology.rank == 0 and self.lease is not None and self.lease.is_lost()
        seen = torch.tensor(
            [
                (time.monotonic() - self.signals.start) / 60.0,
                self.topology.rank == 0 and is_switched_off(self.config),
                0 if name is None else 1 + STOP_SIGNALS.index(name),
                is_lost,
                self.topology.rank == 0 and self.layout_file is not None and Path(self.layout_file).exists(),
                self.can_grow(),
            ],
            dtype=torch.float64,
            device="cpu",
        )
        return all_reduce(seen, self.topology.world, dist.ReduceOp.MAX, of="stop conditions").tolist()


def is_switched_off(config: TrainingConfig) -> bool:
    """Return whether the file of --kill-switch-path exists."""
    return config.kill_switch_path is not None and Path(config.kill_switch_path).exists()


def exit_if_switched_off(config: TrainingConfig, topology: Topology) -> None:
    """End a run whose kill switch exists already, before any work is done.

    Raises:
        SystemExit: with status 0, on every rank.
    """
    seen = torch.tensor(float(topology.rank == 0 and is_switched_off(config)), device=topology.device)
    if largest_of_all(seen, topology):
        log.warning(
            "--kill-switch-path %s exists: remove it to train; exiting before training",
            config.kill_switch_path,
        )
        raise SystemExit(0)
