"""Notice the loss of a process of a group, and free the main threads of the others.

Each process watches the next one, which is lost if its store closes the connection or its heartbeat stops.
It then sets `alarm` at the leader's store. On an alarm, each process closes the connections that its main
thread may be waiting for, because gloo ends no wait otherwise. A main thread that waits on, as after a loss
amid a large message of gloo, ends with its process, which begins again by `exec`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

from megalite.distributed.agreement import call_within
from megalite.distributed.processes import ANSWER_SECONDS, CLOSED, KnownProcesses
from megalite.distributed.regroup import LEADS, POLL_SECONDS, SILENCE_SECONDS, TrainingGroup
from megalite.utils.log import THIS_RANK, log
from megalite.utils.torch_private import abort_process_groups

_BEAT, _ALARM, _ERRORS = "beat", "alarm", "errors"
_LEAVE_SECONDS = 10.0
"""Seconds after an alarm in which the main thread must have left training."""
_CLEAN_UP_SECONDS = 60.0
"""Seconds after an alarm in which its memory and process groups must be freed."""


class LossWatch:
    """Threads that notice the loss of a process of a group, and then free this one's main thread.

    Attributes:
        alarmed_at: when this process noticed a loss, by `time.monotonic`; None before.
        all_failed: whether all ranks have an error, by the last `is_loss`.
    """

    def __init__(self, processes: KnownProcesses, group: TrainingGroup) -> None:
        self._processes, self._store, self._group = processes, processes.store, group
        self._kept = _connections().keys()
        self._own_alarm, self._has_alarmed = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._heard_at = time.monotonic()
        self._leave_seconds = _LEAVE_SECONDS
        self.alarmed_at: float | None = None
        self.all_failed = False
        threading.Thread(target=self._listen, name="listen-to-processes", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="watch-processes", daemon=True)
        self._thread.start()

    def is_loss(self, error: Exception) -> bool:
        """Return whether an error of training comes from the loss of another process; if so, set the alarm.

        It is not if all ranks have an error. It may take seconds: a loss may be noticed after its error.
        """
        if isinstance(error, RuntimeError) and "gloo" in str(error):  # another process is gone
            return self._set_alarm()
        deadline, key = time.monotonic() + ANSWER_SECONDS, f"{_ERRORS}/{self._group.generation}"
        with suppress(*CLOSED):
            leader = self._processes.connect(self._group.leader)
            number = call_within(ANSWER_SECONDS, lambda: leader.add(key, 1))
            while self.alarmed_at is None and number < len(self._group.ranks) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                number = call_within(ANSWER_SECONDS, lambda: leader.add(key, 0))
            self.all_failed = number >= len(self._group.ranks)
            return self.alarmed_at is not None and self._set_alarm()
        return self._set_alarm()

    def _set_alarm(self) -> bool:
        """Let the thread set the alarm, wait until it has, and return True."""
        self._own_alarm.set()
        self._has_alarmed.wait()
        self._leave_seconds = _CLEAN_UP_SECONDS  # the main thread has left training
        return True

    def __enter__(self) -> LossWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, and let go of the store; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            del self._store

    def _listen(self) -> None:
        """Wait for the alarm, and for heartbeats of the next process. It may not return if that hangs."""
        rank = self._group.ranks.index(self._processes.own)
        with suppress(*CLOSED):
            leader = self._processes.connect(self._group.leader)
            following = self._processes.connect(self._group.ranks[(rank + 1) % len(self._group.ranks)])
            beats = -1
            while not self._closed.is_set() and not leader.check([self._alarm]):
                if (count := following.add(_BEAT, 0)) != beats:
                    beats, self._heard_at = count, time.monotonic()
                time.sleep(POLL_SECONDS)
        self._own_alarm.set()

    def _run(self) -> None:
        while not self._own_alarm.is_set() and time.monotonic() - self._heard_at < SILENCE_SECONDS:
            self._store.add(_BEAT, 1)
            if self._group.leader == self._processes.own:
                self._store.add(LEADS, 1)
            if self._closed.wait(POLL_SECONDS):
                return
        self.alarmed_at = time.monotonic()
        with suppress(*CLOSED):
            leader = self._processes.connect(self._group.leader)
            call_within(ANSWER_SECONDS, lambda: leader.set(self._alarm, ""))
        # The main thread, which waits for this in `is_loss`, must not abort at the same time.
        with suppress(*CLOSED):
            call_within(ANSWER_SECONDS, abort_process_groups)
        self._has_alarmed.set()
        try:
            self._end_waits(self.alarmed_at)
        except BaseException:
            log.exception("this process cannot leave its work, and ends", extra=THIS_RANK)
            os._exit(1)

    def _end_waits(self, began_at: float) -> None:
        """End what the main thread waits for until it has left training, or begin again."""
        # Connections of process groups that were just starting are closed later.
        while not self._closed.wait(POLL_SECONDS):
            self._store.add(_BEAT, 1)
            self._close_connections()
            if time.monotonic() - began_at > self._leave_seconds:
                log.warning(
                    "another rank was lost, and this process has not left its work in %g s: it begins again",
                    self._leave_seconds,
                    extra=THIS_RANK,
                )
                self._processes.begin_again()

    @property
    def _alarm(self) -> str:
        return f"{_ALARM}/{self._group.generation}"

    def _close_connections(self) -> None:
        """Close the connections that have been opened since the watch began, but not others' to the store."""
        _, own_port = self._processes.known[self._processes.own].address
        for name, descriptor in _connections().items():
            if name not in self._kept:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.getsockname()[1] != own_port:
                        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> dict[str, int]:
    """Return the descriptors of this process's TCP connections by the name of the socket; Linux only."""
    found = {}
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if not name.startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        each.getpeername()  # raises for a socket that listens
                        found[name] = descriptor
    return found
