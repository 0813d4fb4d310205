"""Let the processes of a run agree on those that train it, and again each time one of them is lost.

Each process has a store of its own, a TCPStore at an address that all know from the start. The processes meet
at the store of the first process that can be reached, the leader: each sets `here` and waits for `group`. The
leader waits for all that can be reached, chooses the processes of the next group, and answers. A process that
is not chosen is a spare: it waits on for the next meeting. So the processes need no store that outlives them.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn

from torch.distributed import Store, TCPStore

from megalite.distributed.agreement import RankRecord, call_within, check_agreement
from megalite.distributed.rendezvous import Launch, listener_at, open_store, own_address
from megalite.utils.errors import UserError

GENERATION = "MEGALITE_GENERATION"
"""Variable with the name of the run's processes and the number of their group, which increases."""

_REJOINS = "MEGALITE_REJOINS"
"""Variable with the name and the processes of the run that this process rejoins; see `begin_again`."""

_HERE, _GROUP, _END, _COMING, _NEWEST = "here", "group", "end", "coming", "newest"
LEADS = "leads"
"""Key of a number that a leader increases as long as it is alive."""
POLL_SECONDS = 0.1
_CONNECT_SECONDS = 2.0
_MAX_THREADS = 64
ANSWER_SECONDS = 5.0
SILENCE_SECONDS = 15.0
"""Seconds without a heartbeat after which a process is lost. A thread beats, also in long computations."""
_REJOIN_SECONDS = 2.0
"""Seconds after which a process that rejoins leaves another one that does not lead."""
_ARRIVAL_SECONDS = 60.0
"""Seconds that a meeting waits for processes that can be reached."""
CLOSED = (RuntimeError, OSError)  # torch's errors of stores are RuntimeErrors


class HeldPart(NamedTuple):
    """Part of a local save that a process's node has.

    Attributes:
        save: name of the save.
        num_parts: number of its parts.
        part: number of this one.
    """

    iteration: int
    save: str
    num_parts: int
    part: int


class Process(NamedTuple):
    """Process of a run.

    Attributes:
        node: number of its node: that of the first process there.
        address: host and port of its store.
    """

    node: int
    local_rank: int
    address: tuple[str, int]


class Past(NamedTuple):
    """Progress of a group that a loss has ended.

    Attributes:
        ranks: process of each rank.
        iteration: number of the last finished iteration.
        layout: its layout in words.
        seconds: how long ago it has noticed the loss that has ended it.
    """

    ranks: Sequence[int]
    iteration: int
    layout: str
    seconds: float


class Arrival(NamedTuple):
    """Message of a process to the leader of a meeting.

    Attributes:
        parts: what its node has; the next group has all parts of the newest save, if it can.
        past: what the last of its groups that has trained has done, if it knows of one.
    """

    parts: Sequence[HeldPart] = ()
    past: Past | None = None


@dataclass(frozen=True)
class TrainingGroup:
    """Processes that train from one meeting to the next.

    Attributes:
        generation: number of the group; larger than those of the groups before it.
        leader: process whose store the ranks use.
        ranks: process of each rank.
        spares: processes that wait for the next meeting.
        past: what the last group before it that has trained has done; None if there is none.
    """

    generation: int
    leader: int
    ranks: Sequence[int]
    spares: Sequence[int]
    past: Past | None


@dataclass
class Processes:
    """All processes of a run, as one of them sees them.

    Attributes:
        name: name of the run's processes, which no other run has.
        own: number of this process: its rank when the launcher started it.
        known: the processes, by number.
        newest: number of the newest group that this process knows of; -1 before the first.
        lost: processes that no meeting waits for, because they were lost before.
    """

    name: str
    own: int
    known: Sequence[Process]
    _store: Store | None
    _first_store: Store | None  # others may still read from it
    _environment: Mapping[str, str]  # of the launch
    newest: int = -1
    lost: set[int] = field(default_factory=set)
    _has_met: bool = False

    @staticmethod
    def of_launch(launch: Launch, timeout: timedelta, must_agree: RankRecord) -> Processes:
        """Exchange the addresses of all launched processes.

        Raises:
            UserError: there is no rendezvous with the other processes, or their settings differ.
        """
        environment = {**os.environ}
        if rejoins := environment.pop(_REJOINS, None):
            name, newest, *known = json.loads(rejoins)
            known = [Process(node, rank, tuple(address)) for node, rank, address in known]
            store, _ = _open_store_at(*known[launch.rank].address)
            return Processes(name, launch.rank, known, store, None, environment, newest)
        first = open_store(launch, timeout)
        check_agreement(first, launch.rank, launch.world_size, must_agree, "start")
        store, (host, port) = _open_store_at(own_address(), 0)
        own = Process(launch.rank - launch.local_rank, launch.local_rank, (host, port))
        first.set(f"megalite/process/{launch.rank}", json.dumps(own))
        if launch.rank == 0:
            first.set("megalite/processes", secrets.token_hex(8))
        texts = first.multi_get([f"megalite/process/{number}" for number in range(launch.world_size)])
        known = [Process(node, rank, (host, port)) for node, rank, (host, port) in map(json.loads, texts)]
        name = first.get("megalite/processes").decode()
        return Processes(name, launch.rank, known, store, first, environment)

    @property
    def rejoins(self) -> bool:
        """Return whether this process has begun again."""
        return self._first_store is None

    def meet(self, arrival: Arrival, largest: Callable[[int], int]) -> TrainingGroup:
        """Agree with the others on the next group; a spare waits here until it is needed.

        Args:
            largest: returns how many of a number of processes can train; 0 if none can.

        Raises:
            SystemExit: the run has ended while this process was a spare; with the run's status.
            UserError: the processes that are left cannot train; raised on all of them.
        """
        # The others have met without a process that rejoins, or are about to: it leads only if nobody does.
        rejoins, began_at = self.rejoins and not self._has_met, time.monotonic()
        candidates = {*range(len(self.known) if rejoins else self.own)} - {self.own}
        idle: set[int] = set()  # they can be reached, and do not lead
        while True:
            left = self._reachable(candidates)
            if not left - idle:
                is_overdue = time.monotonic() - began_at > _ARRIVAL_SECONDS
                if not rejoins or not left or (is_overdue and self.own < min(left)):
                    return self._lead(arrival, largest)
                idle.clear()
                continue
            leader = min(left - idle)
            group = self._follow(leader, arrival, _REJOIN_SECONDS if rejoins else SILENCE_SECONDS)
            if group is not None:
                return group
            idle |= self._reachable({leader})

    def _follow(self, leader: int, arrival: Arrival, patience: float) -> TrainingGroup | None:
        """Wait for the answer of a leader; return None if it is lost, or leads no meeting."""
        here, key = f"{_HERE}/{self.own}", f"{_GROUP}/{self.own}"
        leads, led_at = -1, time.monotonic()
        end: bytes | None = None
        answer: bytes | None = None
        try:
            store = self.connect(leader)

            def look() -> tuple[int, bytes | None, bytes | None]:
                if store.check([_NEWEST]):
                    self.newest = max(self.newest, int(store.get(_NEWEST)))
                answer = store.get(key) if store.check([key]) else None
                return store.add(LEADS, 0), answer, store.get(_END) if store.check([_END]) else None

            call_within(ANSWER_SECONDS, lambda: store.set(here, json.dumps([self.newest, *arrival])))
            while end is None and answer is None:
                count, answer, end = call_within(ANSWER_SECONDS, look)
                if count != leads:
                    leads, led_at = count, time.monotonic()
                elif time.monotonic() - led_at > patience:
                    break
                time.sleep(POLL_SECONDS)
            call_within(ANSWER_SECONDS, lambda: [store.delete_key(each) for each in (here, key)])
        except CLOSED:
            if end is None and answer is None:
                return None
        if end is not None:
            status = json.loads(end)
            raise UserError(status) if isinstance(status, str) else SystemExit(status)
        if answer is None:
            return None
        told = json.loads(answer)
        group = TrainingGroup(**{**told, "past": told["past"] and Past(*told["past"])})
        self.newest, self._has_met = group.generation, True
        return group

    def _lead(self, arrival: Arrival, largest: Callable[[int], int]) -> TrainingGroup:
        store, began_at = self.store, time.monotonic()
        others = {*range(len(self.known))} - {self.own}
        with self._leading():
            while True:
                here = {number for number in others if store.check([f"{_HERE}/{number}"])}
                coming = {each for each in others if store.check([f"{_COMING}/{self.newest}/{each}"])}
                self.lost -= here | coming
                unknown = others - here - coming - self.lost
                self.lost |= unknown - self._reachable(unknown)
                if time.monotonic() > began_at + _ARRIVAL_SECONDS:
                    self.lost |= others - here
                if not others - here - self.lost:
                    break
                time.sleep(POLL_SECONDS)
            arrivals, newest = {self.own: arrival}, {self.own: self.newest}
            for number in self._reachable(here):
                with suppress(*CLOSED):  # it has just left
                    newest[number], parts, past = json.loads(store.get(f"{_HERE}/{number}"))
                    parts = [HeldPart(*each) for each in parts]
                    arrivals[number] = Arrival(parts, past and Past(*past))
            return self._answer(arrivals, newest, largest, time.monotonic() - began_at)

    def _answer(
        self,
        arrivals: Mapping[int, Arrival],
        newest: Mapping[int, int],
        largest: Callable[[int], int],
        seconds: float,
    ) -> TrainingGroup:
        """Choose the next group, and answer its processes.

        Args:
            newest: the newest group that each process knows of.
            seconds: how long the meeting took.
        """
        told = [
            (newest[each], past.iteration, each) for each, (_, past) in arrivals.items() if past is not None
        ]
        past = arrivals[max(told)[-1]].past if told else None
        if past is not None:
            past = past._replace(seconds=past.seconds + seconds)
        for number in range(len(self.known)):
            self.store.delete_key(f"{_GROUP}/{number}")  # it may not have read its last answer
            if number not in arrivals:
                self.store.delete_key(f"{_HERE}/{number}")
        size = largest(len(arrivals))
        if size == 0:
            left = f"{len(arrivals)} of {len(self.known)} ranks are left"
            error = f"{left}, which the run's layout does not fit"
            self.end(error)
            raise UserError(error)
        parts = {number: each.parts for number, each in arrivals.items()}
        ranks = self._chosen(parts, size, math.inf if past is None else past.iteration)
        self.newest, self._has_met = max(newest.values()) + 1, True
        self.store.set(_NEWEST, str(self.newest))
        group = TrainingGroup(self.newest, self.own, ranks, sorted({*arrivals} - {*ranks}), past)
        for number in ranks:
            self.store.delete_key(f"{_HERE}/{number}")
            self.store.set(f"{_GROUP}/{number}", json.dumps(asdict(group)))
        return group

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Let the others know in the block that this process leads."""
        is_over = threading.Event()

        def beat(store: Store) -> None:
            while not is_over.wait(POLL_SECONDS):
                store.add(LEADS, 1)

        thread = threading.Thread(target=beat, args=[self.store], name="leads-meeting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _chosen(self, alive: Mapping[int, Sequence[HeldPart]], size: int, reached: float) -> list[int]:
        """Choose the processes of a group, in the order of the launch.

        This leader is one of them, and those that have the newest save. The others are from the nodes with
        the most processes.

        Args:
            alive: what each process's node has.
            reached: last iteration of the run so far. Later saves are an earlier run's in the same folder.
        """
        saves = {part[:3] for parts in alive.values() for part in parts if part.iteration <= reached}
        holders = (self._holders(alive, *save) for save in sorted(saves, reverse=True))
        needed = next((found for found in holders if found and len(found) <= size), {self.own})
        on_node = Counter(self.known[number].node for number in alive)
        best = sorted(alive, key=lambda each: (each not in needed, -on_node[self.known[each].node], each))
        return sorted(best[:size])

    def _holders(
        self, alive: Mapping[int, Sequence[HeldPart]], iteration: int, save: str, num_parts: int
    ) -> set[int]:
        """Return this leader and further processes that together have a save; empty if a part is lost."""
        held = {
            number: {each.part for each in parts if (each.iteration, each.save) == (iteration, save)}
            for number, parts in alive.items()
        }
        found, missing = {self.own}, {*range(num_parts)} - held[self.own]
        while missing:
            best = max(sorted(held), key=lambda number: len(held[number] & missing))
            if not held[best] & missing:
                return set()
            found.add(best)
            missing -= held[best]
        return found

    def environment(self, group: TrainingGroup) -> dict[str, str]:
        """Return the variables from which this process reads its rank in the group, as torchrun's."""
        own = self.known[self.own]
        host, port = self.known[group.leader].address
        restarts = int(self._environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return {
            "RANK": str(group.ranks.index(self.own)),
            "WORLD_SIZE": str(len(group.ranks)),
            "LOCAL_RANK": str(own.local_rank),
            "LOCAL_WORLD_SIZE": str(sum(self.known[number].node == own.node for number in group.ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restarts + group.generation),
            GENERATION: f"{self.name} {group.generation}",
        }

    def end(self, status: int | str) -> None:
        """Let the spares of this leader end with a status, or with an error; wait until they know."""
        assert self._store is not None
        waiting = [f"{_HERE}/{number}" for number in range(len(self.known))]
        self._store.set(_END, json.dumps(status))
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and any(self._store.check([key]) for key in waiting):
            time.sleep(POLL_SECONDS)

    def begin_again(self) -> NoReturn:
        """Replace this process by a new one of the same command, which comes to the next meeting.

        The launcher does not notice. It ends whatever this process waits for.
        """
        key = f"{_COMING}/{self.newest}/{self.own}"

        def announce(number: int) -> None:
            with suppress(*CLOSED):
                self.connect(number).set(key, "")

        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            list(pool.map(announce, {*range(len(self.known))} - {self.own}))
        for descriptor in os.listdir("/dev/fd"):
            with suppress(OSError):
                os.set_inheritable(int(descriptor), int(descriptor) < 3)
        rejoins = json.dumps([self.name, self.newest, *self.known])
        environment = {**self._environment, _REJOINS: rejoins}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

    @property
    def store(self) -> Store:
        """Return this process's store."""
        assert self._store is not None
        return self._store

    def leave(self) -> None:
        """Close the store, by which the others learn that this process is lost."""
        self._store = None

    def connect(self, number: int) -> TCPStore:
        """Connect to a process's store. Calls of it may not return if the process hangs: see `call_within`.

        Raises:
            RuntimeError or OSError: the process cannot be reached.
        """
        host, port = self.known[number].address
        socket.create_connection((host, port), _CONNECT_SECONDS).close()  # TCPStore would try again and again
        timeout = timedelta(seconds=ANSWER_SECONDS)
        connect = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return call_within(ANSWER_SECONDS, connect)

    def _reachable(self, numbers: Collection[int]) -> set[int]:
        """Return those of some processes that accept connections."""

        def accepts(number: int) -> bool:
            with suppress(OSError), socket.create_connection(self.known[number].address, _CONNECT_SECONDS):
                return True
            return False

        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            found = zip(numbers, pool.map(accepts, numbers), strict=True)
            return {number for number, is_there in found if is_there}


def _open_store_at(host: str, port: int) -> tuple[TCPStore, tuple[str, int]]:
    """Return a store that this process serves, and its address."""
    listener = listener_at(host, port)
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=ANSWER_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, (host, port)
