"""The processes of a run: each has a store of its own, at an address that the others know.

Most are those of one launch. A process of another launch, as on a repaired node, reads the addresses from one
of them, and tells its own to the leader of the next meeting; see `regroup`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch.distributed import Store, TCPStore

from megalite.distributed.agreement import RankRecord, call_within, check_agreement
from megalite.distributed.rendezvous import Launch, choose_interface, listener_at, open_store, own_address
from megalite.utils.errors import UserError, few

_REJOINS = "MEGALITE_REJOINS"
"""Variable with the file that says what this process knew before it began again; see `begin_again`."""

COMING = "coming"
_RUN = "run"
_CONNECT_SECONDS = 2.0
_MAX_THREADS = 64
ANSWER_SECONDS = 5.0
FIRST_JOINED = 1 << 20
"""Smallest number of a process of another launch."""
T = TypeVar("T", bound="KnownProcesses")
CLOSED = (RuntimeError, OSError)  # torch's errors of stores are RuntimeErrors


class Process(NamedTuple):
    """Process of a run.

    Attributes:
        address: host and port of its store.
    """

    node: str
    local_rank: int
    address: tuple[str, int]


@dataclass
class KnownProcesses:
    """The processes of a run that one of them knows.

    Attributes:
        name: name of the run's processes, which no other run has.
        own: number of this process: its rank when the launcher started it, if that was the run's launch.
        known: the processes, by number.
        settings: what is the same on all processes.
        newest: number of the newest group that this process knows of; -1 before the first.
        ranks: process of each rank of that group.
        joins: whether this process has come from another launch, and has not been in a group.
    """

    name: str
    own: int
    known: dict[int, Process]
    _store: Store | None
    _first_store: Store | None  # others may still read from it
    _environment: Mapping[str, str]  # of the launch
    settings: RankRecord = field(default_factory=dict)
    newest: int = -1
    ranks: Sequence[int] = ()
    joins: bool = False

    @classmethod
    def of_launch(cls: type[T], launch: Launch, timeout: timedelta, must_agree: RankRecord) -> T:
        """Exchange the addresses of all launched processes.

        Raises:
            UserError: there is no rendezvous with the other processes, or their settings differ.
        """
        environment = {**os.environ}
        if rejoins := environment.pop(_REJOINS, None):
            told = json.loads(Path(rejoins).read_text())
            Path(rejoins).unlink()
            known = by_number(told["known"])
            store, _ = _open_store_at(*known[told["own"]].address)
            newest = told["newest"], told["ranks"]
            return cls(
                told["name"], told["own"], known, store, None, environment, must_agree, *newest
            ).publish()
        first = open_store(launch, timeout)
        check_agreement(first, launch.rank, launch.world_size, must_agree, "start")
        store, (host, port) = _open_store_at(own_address(), 0)
        own = Process(str(launch.rank - launch.local_rank), launch.local_rank, (host, port))
        first.set(f"megalite/process/{launch.rank}", json.dumps([launch.rank, *own]))
        if launch.rank == 0:
            first.set("megalite/processes", secrets.token_hex(8))
        texts = first.multi_get([f"megalite/process/{number}" for number in range(launch.world_size)])
        known = by_number(map(json.loads, texts))
        name = first.get("megalite/processes").decode()
        return cls(name, launch.rank, known, store, first, environment, must_agree).publish()

    @classmethod
    def of_run(
        cls: type[T], launch: Launch, name: str, addresses: Sequence[str], must_agree: RankRecord
    ) -> T | None:
        """Come to a run of another launch; return None if none of its processes can be reached.

        Args:
            addresses: host:port of the stores of some of them.

        Raises:
            UserError: the settings of this process are not the run's.
        """
        if _REJOINS in os.environ:
            return None
        for address in addresses:
            host, _, port = address.rpartition(":")
            with suppress(*CLOSED):
                there = _connect((host, int(port)))
                told = json.loads(call_within(ANSWER_SECONDS, partial(there.get, _RUN)))
                if told["name"] == name:
                    break
        else:
            return None
        if differ := [each for each in must_agree if told["settings"].get(each) != must_agree[each]]:
            each = differ[0]
            raise UserError(
                f"--join-run: the run in --save has another {few(differ)}; {each} is {must_agree[each]} here "
                f"and {told['settings'].get(each)} there: start this node with the same"
            )
        choose_interface(host, many_hosts=True)
        store, own_place = _open_store_at(own_address(host), 0)
        # Its node has this name alone, and consecutive numbers, also if the launcher restarts it.
        of_launcher = f"{os.getppid()} {os.environ.get('MASTER_PORT')} {launch.restarts}"
        node = f"{socket.gethostname()} {of_launcher} {launch.rank - launch.local_rank}"
        digest = hashlib.sha256(node.encode()).digest()
        own = FIRST_JOINED * (1 + int.from_bytes(digest[:4], "big")) + launch.local_rank
        known = {**by_number(told["known"]), own: Process(node, launch.local_rank, own_place)}
        newest = told["newest"], told["ranks"]
        return cls(name, own, known, store, None, {**os.environ}, must_agree, *newest, joins=True).publish()

    def publish(self: T) -> T:
        """Let processes that join read what this one knows of the run; return this object."""
        self.store.set(_RUN, json.dumps(self._told()))
        return self

    def _told(self) -> dict[str, Any]:
        known = [[number, *process] for number, process in self.known.items()]
        newest = {"newest": self.newest, "ranks": [*self.ranks]}
        return {"name": self.name, "known": known, "settings": {**self.settings}, **newest}

    @property
    def rejoins(self) -> bool:
        """Return whether this process has begun again, or comes from another launch."""
        return self._first_store is None

    def begin_again(self) -> NoReturn:
        """Replace this process by a new one of the same command, which comes to the next meeting.

        The launcher does not notice. It ends whatever this process waits for.
        """
        key = f"{COMING}/{self.newest}/{self.own}"

        def announce(number: int) -> None:
            with suppress(*CLOSED):
                self.connect(number).set(key, "")

        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            list(pool.map(announce, {*self.known} - {self.own}))
        for descriptor in os.listdir("/dev/fd"):
            with suppress(OSError):
                os.set_inheritable(int(descriptor), int(descriptor) < 3)
        with tempfile.NamedTemporaryFile("w", prefix="megalite-", delete=False) as file:
            json.dump({**self._told(), "own": self.own}, file)
        environment = {**self._environment, _REJOINS: file.name}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

    @property
    def num_launched(self) -> int:
        """Return the number of processes of the run's own launch."""
        return sum(number < FIRST_JOINED for number in self.known)

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
        return _connect(self.known[number].address)

    def reachable(self, numbers: Collection[int]) -> set[int]:
        """Return those of some processes that accept connections."""
        return {number for number, accepts in self._answers(numbers).items() if accepts}

    def silent(self, numbers: Collection[int]) -> set[int]:
        """Return those whose host does not answer: it is down, or the network is cut. Others have ended."""
        return {number for number, accepts in self._answers(numbers).items() if accepts is None}

    def _answers(self, numbers: Collection[int]) -> dict[int, bool | None]:
        """Return whether each accepts a connection; None if its host does not answer."""

        def accepts(number: int) -> bool | None:
            try:
                socket.create_connection(self.known[number].address, _CONNECT_SECONDS).close()
            except ConnectionRefusedError:
                return False
            except OSError:
                return None
            return True

        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            return dict(zip(numbers, pool.map(accepts, numbers), strict=True))


def by_number(told: Iterable[Any]) -> dict[int, Process]:
    """Return processes from JSON: a list with number, node, local rank and address for each."""
    return {number: Process(node, rank, (host, port)) for number, node, rank, (host, port) in told}


def _connect(address: tuple[str, int]) -> TCPStore:
    socket.create_connection(address, _CONNECT_SECONDS).close()  # TCPStore would try again and again
    timeout = timedelta(seconds=ANSWER_SECONDS)
    connect = partial(TCPStore, *address, is_master=False, wait_for_workers=False, timeout=timeout)
    return call_within(ANSWER_SECONDS, connect)


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
