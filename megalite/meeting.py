"""Where ranks wait for each other for as long as one of them works, outside of any collective's time-out."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_HELLO = "megalite/hello"
_ANSWER = "megalite/answer"
_ARRIVED = "megalite/arrived"
_BEATS = "megalite/beats"

_BEAT_SECONDS = 2.0
_SILENCE_SECONDS = 10.0
"""After so long without a beat nobody is at work: those who are missing are late or gone, and a collective's
own time-out and errors are the better way to find out."""
_MAX_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 5.0


@contextmanager
def at_work(store: Store) -> Iterator[None]:
    """Lets the ranks that wait in `wait_for_all` know, from a thread, that this one is in the block."""
    done = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # without the store the others go on to their collective
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
    """Returns once every rank has called it, or once none that has not is at work: no error, no time-out.

    Every rank calls it equally often. No rank comes to the next meeting before all have come to this one, so
    that the number of arrivals alone says which one it is.
    """
    with suppress(RuntimeError):  # the store is gone with its rank: the collective says it better
        arrived = store.add(_ARRIVED, 1)
        key = f"megalite/met/{-(-arrived // world_size)}"
        if arrived % world_size == 0:
            store.set(key, "")
        else:
            wait_for_key(store, key)


def wait_for_key(store: Store, key: str) -> bool:
    """Waits until some rank sets the key; False once none is at work that could.

    It asks for the key, rather than `store.wait`, which warns each time that it has waited long enough, and
    would keep other threads of this rank from the store meanwhile.
    """
    pause, heard, beats = 0.001, time.monotonic(), -1
    while not store.check([key]):
        now = time.monotonic()
        if (count := store.add(_BEATS, 0)) != beats:
            heard, beats = now, count
        elif now - heard > _SILENCE_SECONDS:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_SECONDS)
    return True


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Return once something listens at an address: torch waits for its store up to twice its time-out.

    Raises:
        TimeoutError: nothing did for so many seconds.
    """
    for _ in _looks(time.monotonic() + seconds, f"nothing listened there for {seconds:g} s"):
        with suppress(OSError):
            socket.create_connection((host, port), timeout=min(seconds, _CONNECT_SECONDS)).close()
            return


def name_of_start(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """A name that the ranks of this start share and no earlier start had: a prefix for all that they store.

    torchrun keeps one store while it restarts its ranks, with every key that those before have left: a rank
    would read where to connect to from one that is gone. So each rank says a word that nobody said before,
    and rank 0 answers it with the name, as often as the word changes.

    Raises:
        TimeoutError: some rank did not come in so many seconds.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    if rank == 0:
        name = f"megalite/start/{word}"
        _answer_all(store, name, world_size, deadline)
        return name
    store.set(f"{_HELLO}/{rank}", word)
    for _ in _looks(deadline, "rank 0 did not answer"):
        if store.check([f"{_ANSWER}/{rank}"]):
            asked, _, name = store.get(f"{_ANSWER}/{rank}").decode().partition(" ")
            if asked == word:
                break
    store.set(f"{name}/{rank}", "")
    return name


def _answer_all(store: Store, name: str, world_size: int, deadline: float) -> None:
    answered: dict[int, str] = {}
    missing = list(range(1, world_size))
    for _ in _looks(deadline, f"{world_size - 1} ranks were expected and did not all come"):
        for rank in missing:
            if store.check([f"{_HELLO}/{rank}"]):
                word = store.get(f"{_HELLO}/{rank}").decode()
                if answered.get(rank) != word:
                    store.set(f"{_ANSWER}/{rank}", f"{word} {name}")
                    answered[rank] = word
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
        if not missing:
            return


def _looks(deadline: float, what: str) -> Iterator[None]:
    """Turns of a loop that waits for something, with longer and longer pauses."""
    pause = 0.001
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, _MAX_POLL_SECONDS / 5)
    raise TimeoutError(what)
