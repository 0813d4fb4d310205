"""Let ranks agree over the store, which exists before any process group: on their start, and by barriers.

`check_agreement` checks that all ranks of a run were started with the same flags and code, and read the same
files. Every rank describes itself with a record, a mapping from names ("--lr") to values as text ("0.0001").
The ranks exchange digests of their records: each rank writes one small key, and rank 0 reads all of them at
once. If digests differ, one record for each distinct digest is exchanged.

The barriers wait as long as a rank works, without a collective's timeout.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

import megalite
from megalite.utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

RankRecord = Mapping[str, str]
T = TypeVar("T")

REFUSED = "refused"
"""The only name in the record of a rank that refuses its own command line."""

_MAX_KINDS = 8  # number of distinct records that are compared
_MAX_LINES = 20
_MAX_RANGES = 8  # number of ranges of ranks in a message
_ABSENT = "nothing"
_SECONDS_TO_READ = 10.0


def code_record() -> dict[str, str]:
    """Return the versions of megalite and torch, and a digest of all Python files of megalite."""
    folder = Path(megalite.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return {
        "the version of megalite": f"{megalite.__version__} (digest of its files {digest.hexdigest()[:12]})",
        "the version of torch": torch.__version__,
    }


def check_agreement(store: Store, rank: int, world_size: int, record: RankRecord | None, topic: str) -> None:
    """Raise the same error on every rank if the ranks' records differ.

    Every rank must call it equally often for each topic.

    Args:
        store: store without keys of an earlier start.
        record: record of this rank; None if it has nothing to compare.
        topic: name for the compared records.

    Raises:
        UserError: one line for each name whose value differs, with the ranks and their values.
        RuntimeError: a rank did not call it within the store's timeout.
    """
    # Ranks may run different versions of megalite, so these keys must not change.
    number = store.add(f"megalite/agreement/{topic}/calls/{rank}", 1)
    prefix = f"megalite/agreement/{topic}/{number}"
    text = "" if record is None else json.dumps(record, sort_keys=True)
    # A rank without a record has an empty digest.
    store.set(f"{prefix}/digest/{rank}", text and hashlib.sha256(text.encode()).hexdigest())
    kinds: list[list[int]] = []
    if rank == 0:
        digests = store.multi_get([f"{prefix}/digest/{other}" for other in range(world_size)])
        kinds = _kinds(digests)
        representatives = [ranks[0] for ranks in kinds[:_MAX_KINDS]] if len(kinds) > 1 else []
        store.set(f"{prefix}/requested", json.dumps(representatives))
    requested: list[int] = json.loads(store.get(f"{prefix}/requested"))
    if not requested:
        return
    if rank in requested:
        store.set(f"{prefix}/record/{rank}", text)
    if rank == 0:
        keys = [f"{prefix}/record/{other}" for other in requested]
        records = [json.loads(found) for found in store.multi_get(keys)]
        message = "\n".join(_differences(kinds, records, world_size))
        store.set(f"{prefix}/message", message)
        _wait_for_readers(store, f"{prefix}/readers", world_size - 1)
    else:
        message = store.get(f"{prefix}/message").decode()
        store.add(f"{prefix}/readers", 1)
    raise UserError(message)


def _wait_for_readers(store: Store, key: str, number: int) -> None:
    """Wait until this many ranks have read the message, because the store can end with this process."""
    deadline = time.monotonic() + _SECONDS_TO_READ
    with suppress(RuntimeError):
        while store.add(key, 0) < number and time.monotonic() < deadline:
            time.sleep(0.01)


def _kinds(digests: Sequence[bytes]) -> list[list[int]]:
    """Group the ranks by digest, the largest group first; ranks without a record are in no group."""
    groups = defaultdict[bytes, list[int]](list)
    for rank, digest in enumerate(digests):
        if digest:
            groups[digest].append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _differences(kinds: Sequence[Sequence[int]], records: Sequence[RankRecord], world_size: int) -> list[str]:
    """Return one line for each name whose value is not the same in all records.

    Args:
        kinds: groups of ranks with equal records.
        records: records of the first `_MAX_KINDS` groups.
    """
    lines = []
    for ranks, record in zip(kinds, records, strict=False):
        if REFUSED in record:
            lines.append(f"{_named(ranks)} alone: {record[REFUSED]}")
    compared = [
        (ranks, record) for ranks, record in zip(kinds, records, strict=False) if REFUSED not in record
    ]
    for name in dict.fromkeys(name for _, record in compared for name in record):
        by_value = defaultdict[str, list[int]](list)
        for ranks, record in compared:
            by_value[record.get(name, _ABSENT)] += ranks
        if len(by_value) > 1:
            lines.append(
                f"{name} differs between ranks: {_values(by_value, world_size)}; start every rank with "
                "the same"
            )
    if (more := len(lines) - _MAX_LINES) > 0:
        lines[_MAX_LINES:] = [f"{more} more settings differ between ranks"]
    if more_kinds := kinds[len(records) :]:
        lines.append(f"{_named(rank for ranks in more_kinds for rank in ranks)} differ too, in other ways")
    return lines


def _values(by_value: Mapping[str, Sequence[int]], world_size: int) -> str:
    """Describe which ranks have which value, the most common value last."""
    ordered = sorted(by_value.items(), key=lambda item: (len(item[1]), -min(item[1])))
    parts = [f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in ordered]
    value, ranks = ordered[-1]
    if len(ranks) > 1 and sum(map(len, by_value.values())) == world_size:
        parts[-1] = f"the others {value}"
    return ", ".join(parts)


def _named(ranks: Iterable[int]) -> str:
    """Format ranks, with ranges of consecutive ranks: "ranks 0 to 3, 8"."""
    numbers = sorted(ranks)
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    ranges = [
        str(first) if first == last else f"{first}{', ' if last == first + 1 else ' to '}{last}"
        for first, last in zip(starts, ends, strict=True)
    ]
    if len(ranges) > _MAX_RANGES:
        ranges[_MAX_RANGES:] = [f"… ({len(numbers)} in all)"]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}"


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


class NoAnswer(RuntimeError):
    """Raised if a call did not return in time, or failed."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function that may never return in its own thread, and return its result.

    Raises:
        NoAnswer: it did not return in time, or raised an error.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="call-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    raise NoAnswer(str(errors[0]) if errors else f"no answer in {seconds:g} s") from None


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
