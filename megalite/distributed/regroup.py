"""Let the processes of a run agree on those that train it, and again each time one of them is lost.

They meet at the store of the first process that can be reached, the leader: each sets `here` and waits for
`group`. The leader waits for all that can be reached, chooses the processes of the next group, and answers. A
process that is not chosen is a spare: it waits on for the next meeting. So the processes need no store that
outlives them.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed import Store

from megalite.distributed.agreement import call_within
from megalite.distributed.processes import (
    ANSWER_SECONDS,
    CLOSED,
    COMING,
    FIRST_JOINED,
    KnownProcesses,
    Process,
    by_number,
)
from megalite.utils.errors import UserError
from megalite.utils.log import THIS_RANK, log

GENERATION = "MEGALITE_GENERATION"
"""Variable with the name of the run's processes, the number of their group, which increases, and addresses of
some of them."""
_MAX_ADDRESSES = 16

_HERE, _GROUP, _END = "here", "group", "end"
_NEWEST = "newest"
"""Key of the number of a leader's newest group, and of its ranks."""
_ARRIVALS = "arrivals"
"""Key of the number of arrivals at a leader, each of which has a key of its own."""
LEADS = "leads"
"""Key of a number that a leader increases as long as it is alive."""
POLL_SECONDS = 0.1
SILENCE_SECONDS = 15.0
"""Seconds without a heartbeat after which a process is lost. A thread beats, also in long computations."""
_REJOIN_SECONDS = 2.0
"""Seconds after which a process that rejoins leaves another one that does not lead."""
_ARRIVAL_SECONDS = 60.0
"""Seconds that a meeting waits for processes that can be reached."""
_SETTLE_SECONDS = 5.0
"""Seconds after the last arrival at which training is interrupted: a node's processes do not come at once."""
_CUT_OFF_SECONDS = 60.0
"""Seconds that the smaller part of a group waits if the rest does not answer. If the network is cut, the rest
goes on, and takes the lease on --save before this part would."""


class HeldPart(NamedTuple):
    """Part of a local save that a process's node has.

    Attributes:
        part: number of this one.
    """

    iteration: int
    save: str
    num_parts: int
    part: int


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
        joined: processes of other launches.
        supersedes: whether the group before cannot train on: some of its ranks are here, or all have ended.
    """

    generation: int
    leader: int
    ranks: Sequence[int]
    spares: Sequence[int]
    past: Past | None
    joined: Mapping[int, Process] = field(default_factory=dict)
    supersedes: bool = True


@dataclass
class Processes(KnownProcesses):
    """All processes of a run, as one of them sees them, and their meetings.

    Attributes:
        lost: processes that no meeting waits for, because they were lost before.
    """

    lost: set[int] = field(default_factory=set)
    _has_met: bool = False
    _num_arrivals: int = 0  # at this leader
    _unread: set[int] = field(default_factory=set)  # arrivals whose process has not told its address yet
    _arrived_at: float = math.inf  # when the newest of those came that no group has been chosen from

    def meet(self, arrival: Arrival, largest: Callable[[int], int]) -> TrainingGroup:
        """Agree with the others on the next group; a spare waits here until it is needed.

        Args:
            largest: returns how many of a number of processes can train; 0 if none can.

        Raises:
            SystemExit: the run has ended while this process was a spare; with the run's status.
            UserError: the processes that are left cannot train; raised on all of them. Or this one joins, and
                there is none.
        """
        # The others have met without a process that rejoins, or are about to: it leads only if nobody does.
        rejoins, began_at = self.rejoins and not self._has_met, time.monotonic()
        candidates = {each for each in self.known if rejoins or each < self.own} - {self.own}
        idle: set[int] = set()  # they can be reached, and do not lead
        while True:
            left = self.reachable(candidates)
            if not left and self.joins:
                raise UserError(
                    "--join-run: the processes of the run in --save have ended, or cannot be reached"
                )
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
            idle |= self.reachable({leader})

    def _follow(self, leader: int, arrival: Arrival, patience: float) -> TrainingGroup | None:
        """Wait for the answer of a leader; return None if it is lost, or leads no meeting."""
        here, key = f"{_HERE}/{self.own}", f"{_GROUP}/{self.own}"
        leads, led_at = -1, time.monotonic()
        end: bytes | None = None
        answer: bytes | None = None
        try:
            store = self.connect(leader)

            def look() -> tuple[int, bytes | None, bytes | None]:
                if store.check([_NEWEST]) and (told := json.loads(store.get(_NEWEST)))[0] > self.newest:
                    self.newest, self.ranks = told
                answer = store.get(key) if store.check([key]) else None
                return store.add(LEADS, 0), answer, store.get(_END) if store.check([_END]) else None

            def come() -> None:
                store.set(here, json.dumps([self.newest, *arrival]))
                own = json.dumps([self.own, *self.known[self.own]])
                store.set(f"{_ARRIVALS}/{store.add(_ARRIVALS, 1)}", own)

            call_within(ANSWER_SECONDS, come)
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
        past, joined = told["past"] and Past(*told["past"]), by_number(told["joined"])
        group = TrainingGroup(**{**told, "past": past, "joined": joined})
        self._begin(group)
        return group

    def _begin(self, group: TrainingGroup) -> None:
        """Take over what a meeting has told."""
        self.known |= group.joined
        self.ranks = group.ranks
        self.newest, self._has_met, self.joins, self._arrived_at = group.generation, True, False, math.inf
        self.publish()

    def _lead(self, arrival: Arrival, largest: Callable[[int], int]) -> TrainingGroup:
        store, began_at, ends_at = self.store, time.monotonic(), None
        silent: set[int] = set()  # ranks of the last group
        with self._leading():
            while True:
                self._know_arrivals()
                others = {*self.known} - {self.own}
                here = {number for number in others if store.check([f"{_HERE}/{number}"])}
                coming = {each for each in others if store.check([f"{COMING}/{self.newest}/{each}"])}
                self.lost -= here | coming
                unknown = others - here - coming - self.lost
                self.lost |= unknown - self.reachable(unknown)
                if time.monotonic() > began_at + _ARRIVAL_SECONDS:
                    self.lost |= others - here
                # If too few are left, others may be joining that only the lost leader has known.
                is_patient = largest(1 + len(here)) == 0 and time.monotonic() < began_at + _SETTLE_SECONDS
                if not others - here - self.lost and not is_patient:
                    if ends_at is None:
                        silent = self.silent((others - here) & {*self.ranks})
                        ends_at = began_at + (_CUT_OFF_SECONDS if self._may_be_cut_off(silent) else 0.0)
                    if time.monotonic() >= ends_at:
                        break
                time.sleep(POLL_SECONDS)
            arrivals, newest = {self.own: arrival}, {self.own: self.newest}
            for number in self.reachable(here):
                with suppress(*CLOSED):  # it has just left
                    newest[number], parts, past = json.loads(store.get(f"{_HERE}/{number}"))
                    parts = [HeldPart(*each) for each in parts]
                    arrivals[number] = Arrival(parts, past and Past(*past))
            supersedes = not silent or not {*arrivals}.isdisjoint(self.ranks)
            return self._answer(arrivals, newest, largest, supersedes, time.monotonic() - began_at)

    def _may_be_cut_off(self, silent: set[int]) -> bool:
        """Return whether most of the last group may be alive, and meet without this part of it.

        Of two halves, the one without the first rank may be cut off.
        """
        rest = len(self.ranks) - len(silent)
        may_be = len(silent) > rest > 0 or (len(silent) == rest > 0 and self.ranks[0] in silent)
        if may_be:
            log.warning(
                "%d of %d ranks do not answer: waiting %g s, in which they go on if only the network is cut",
                *(len(silent), len(self.ranks), _CUT_OFF_SECONDS),
                extra=THIS_RANK,
            )
        return may_be

    def _answer(
        self,
        arrivals: Mapping[int, Arrival],
        newest: Mapping[int, int],
        largest: Callable[[int], int],
        supersedes: bool,
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
        for number in self.known:
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
        generation, spares = max(newest.values()) + 1, sorted({*arrivals} - {*ranks})
        joined = {number: self.known[number] for number in arrivals if number >= FIRST_JOINED}
        group = TrainingGroup(generation, self.own, ranks, spares, past, joined, supersedes)
        self._begin(group)
        self.store.set(_NEWEST, json.dumps([generation, ranks]))
        answer = {**vars(group), "joined": [[number, *joined[number]] for number in joined]}
        for number in ranks:
            self.store.delete_key(f"{_HERE}/{number}")
            self.store.set(f"{_GROUP}/{number}", json.dumps(answer))
        return group

    def _know_arrivals(self) -> None:
        """Take over the addresses of the processes that have come to this leader."""
        before, self._num_arrivals = self._num_arrivals, self.store.add(_ARRIVALS, 0)
        self._unread |= {*range(before + 1, self._num_arrivals + 1)}
        for index in sorted(self._unread):
            if self.store.check([f"{_ARRIVALS}/{index}"]):
                self.known |= by_number([json.loads(self.store.get(f"{_ARRIVALS}/{index}"))])
                self._unread.remove(index)
                self._arrived_at = time.monotonic()

    def can_grow(self, group: TrainingGroup, largest: Callable[[int], int]) -> bool:
        """Return, on the leader of a group, whether more can train with processes that have come since."""
        if self.own != group.leader:
            return False
        self._know_arrivals()
        if time.monotonic() < self._arrived_at + _SETTLE_SECONDS:
            return False
        self._arrived_at = math.inf
        others = {*self.known} - {*group.ranks}
        waiting = self.reachable({each for each in others if self.store.check([f"{_HERE}/{each}"])})
        return largest(len(group.ranks) + len(waiting)) > len(group.ranks)

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
            # With 0, the lease on --save is free only if its holder shows no heartbeat.
            GENERATION: " ".join(
                [self.name, str(group.generation if group.supersedes else 0), *self._addresses(group)]
            ),
        }

    def _addresses(self, group: TrainingGroup) -> list[str]:
        """Return host:port of the first process on some nodes of a group, the leader's among them."""
        first: dict[str, tuple[str, int]] = {}
        for number in [group.leader, *group.ranks, *group.spares]:
            first.setdefault(self.known[number].node, self.known[number].address)
        return [f"{host}:{port}" for host, port in first.values()][:_MAX_ADDRESSES]

    def end(self, status: int | str) -> None:
        """Let the spares of this leader end with a status, or with an error; wait until they know."""
        assert self._store is not None
        with suppress(*CLOSED):
            self._know_arrivals()
        waiting = [f"{_HERE}/{number}" for number in self.known]
        self._store.set(_END, json.dumps(status))
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and any(self._store.check([key]) for key in waiting):
            time.sleep(POLL_SECONDS)
