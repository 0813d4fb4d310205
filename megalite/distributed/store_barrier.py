"""Provide barriers over the store, which wait as long as a rank works, without a collective's timeout."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_HELLO = "megalite/hello"
_ANSWER = "megalite/answer"
_ARRIVED = "megalite/arrived"
_BEATS = "megalite/beats"

_BEAT_SECONDS = 2.0
_SILENCE_SECONDS = 10.0
"""Seconds without a heartbeat after which no rank counts as working. The timeout or error of the next
collective then reports late or lost ranks better than this module could."""
_MAX_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 5.0


@contextmanager
def at_work(store: Store) -> Iterator[None]:
    """Send heartbeats from a thread while this rank is in the block, for ranks in `wait_for_all`."""
    done = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # without the store, the other ranks continue to their next collective
            while not done.wait(_BEAT_SECONDS):
                store.add(_BEATS, 1)

    thread = threading.Thread(target=beat, name="at-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_for_all(store: Store, world_size: int) -> None:
    """Wait until every rank has called this, or until no missing rank is working. There is no timeout.

    Every rank must call it equally often. No rank reaches the next barrier before all have reached this one,
    so the number of arrivals identifies the barrier.
    """
    with suppress(RuntimeError):  # rank 0's store is gone: the next collective reports this better
        arrived = store.add(_ARRIVED, 1)
        key = f"megalite/barrier/{-(-arrived // world_size)}"
        if arrived % world_size == 0:
            store.set(key, "")
        else:
            wait_for_key(store, key)


def wait_for_key(store: Store, key: str) -> bool:
    """Wait until a rank sets the key; return False if no rank is working that could set it.

    It polls, because `store.wait` would warn at each timeout, and block the store for the other threads of
    this rank.
    """
    pause, last_beat, beats = 0.001, time.monotonic(), -1
    while not store.check([key]):
        now = time.monotonic()
        if (count := store.add(_BEATS, 0)) != beats:
            last_beat, beats = now, count
        elif now - last_beat > _SILENCE_SECONDS:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_SECONDS)
    return True


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until a server listens at an address. torch alone would wait for twice its timeout.

    Raises:
        TimeoutError: no server listened within `seconds`.
    """
    for _ in _attempts(time.monotonic() + seconds, f"nothing listened there for {seconds:g} s"):
        with suppress(OSError):
            socket.create_connection((host, port), timeout=min(seconds, _CONNECT_SECONDS)).close()
            return


def name_of_start(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """Agree on a name that no earlier start of the ranks had, as a prefix for all keys in the store.

    When torchrun restarts its ranks, it keeps the store with all keys of the earlier ranks, so a rank could
    read the address of a rank that is gone. Each rank therefore stores a new token, and rank 0 answers with
    the name each time that the token changes.

    Raises:
        TimeoutError: a rank did not arrive within `seconds`.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    if rank == 0:
        name = f"megalite/start/{token}"
        _answer_all(store, name, world_size, deadline)
        return name
    store.set(f"{_HELLO}/{rank}", token)
    for _ in _attempts(deadline, "rank 0 did not answer"):
        if store.check([f"{_ANSWER}/{rank}"]):
            answered, _, name = store.get(f"{_ANSWER}/{rank}").decode().partition(" ")
            if answered == token:
                break
    store.set(f"{name}/{rank}", "")
    return name


def _answer_all(store: Store, name: str, world_size: int, deadline: float) -> None:
    answered: dict[int, str] = {}  # token by rank
    missing = list(range(1, world_size))
    for _ in _attempts(deadline, f"{world_size - 1} ranks were expected and not all arrived"):
        for rank in missing:
            if store.check([f"{_HELLO}/{rank}"]):
                token = store.get(f"{_HELLO}/{rank}").decode()
                if answered.get(rank) != token:
                    store.set(f"{_ANSWER}/{rank}", f"{token} {name}")
                    answered[rank] = token
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
        if not missing:
            return


def _attempts(deadline: float, what: str) -> Iterator[None]:
    """Yield after increasing pauses until the deadline; then raise TimeoutError."""
    pause = 0.001
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, _MAX_POLL_SECONDS / 5)
    raise TimeoutError(what)
