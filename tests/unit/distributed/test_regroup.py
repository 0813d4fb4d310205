"""Processes that meet, lose some of them, and meet again: each is a thread with a store of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import pytest
from torch.distributed import HashStore

from megalite.distributed import processes, regroup
from megalite.distributed.processes import Process, _open_store_at
from megalite.distributed.regroup import Arrival, HeldPart, Past, Processes, TrainingGroup
from megalite.distributed.rendezvous import GLOO_INTERFACE, Launch
from megalite.train import inprocess_restart
from megalite.train.inprocess_restart import LossWatch
from megalite.utils.errors import UserError

PAST = Past([0, 1], 7, "tp 2", 0.0)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (regroup, inprocess_restart):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 2.0)
    for module in (processes, regroup, inprocess_restart):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(regroup, "_SETTLE_SECONDS", 0.3)
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    monkeypatch.setattr(regroup, "_ARRIVAL_SECONDS", 2.0)
    monkeypatch.setattr(regroup, "_REJOIN_SECONDS", 0.5)


@pytest.fixture
def run() -> Iterator[Callable[[int], list[Processes]]]:
    """Returns a function that makes the processes of a run, two on each node."""
    made: list[Processes] = []

    def make(number: int) -> list[Processes]:
        stores = [_open_store_at("127.0.0.1", 0) for _ in range(number)]
        known = {n: Process(str(n // 2), n % 2, address) for n, (_, address) in enumerate(stores)}
        made.extend(
            Processes("run", n, {**known}, store, HashStore(), {}, {"--lr": "1.0"}).publish()
            for n, (store, _) in enumerate(stores)
        )
        return made

    yield make
    for each in made:
        each.leave()


class Meeting:
    """Meetings of some processes, each in a thread; those that stay become spares."""

    def __init__(
        self, processes: Sequence[Processes], size: int, arrivals: Mapping[int, Arrival] | None = None
    ):
        pool = ThreadPoolExecutor(len(processes))
        self.results = {
            each.own: pool.submit(
                each.meet, (arrivals or {}).get(each.own, Arrival()), lambda n: min(n, size)
            )
            for each in processes
        }
        pool.shutdown(wait=False)

    def group(self, *numbers: int) -> TrainingGroup:
        """The group of these processes, which they agree on."""
        groups = [self.results[number].result(timeout=20) for number in numbers]
        assert all(each == groups[0] for each in groups)
        assert list(groups[0].ranks) == list(numbers)
        return groups[0]


def test_a_spare_takes_the_place_of_a_lost_leader(run) -> None:
    processes = run(4)
    first = Meeting(processes, 3)
    group = first.group(0, 1, 2)
    assert (group.generation, group.leader, list(group.spares), group.past) == (0, 0, [3], None)
    processes[0].leave()
    arrivals = {number: Arrival((), PAST) for number in (1, 2)}
    meeting = Meeting(processes[1:3], 3, arrivals)
    meeting.results[3] = first.results[3]  # the spare still waits in its first meeting
    second = meeting.group(1, 2, 3)
    assert second.generation == 1
    assert second.past is not None
    assert second.past[:3] == PAST[:3]


def test_a_spare_meets_the_others_when_its_leader_is_lost(run) -> None:
    processes = run(3)
    address = processes[0].known[0].address
    processes[0].leave()
    meeting = Meeting(processes[1:], 1)
    meeting.group(1)  # 2 is a spare, and waits at 1
    store, _ = _open_store_at(*address)
    again = Processes("run", 0, processes[0].known, store, HashStore(), {})
    processes[1].leave()
    group = again.meet(Arrival(), lambda number: number)
    assert (list(group.ranks), meeting.results[2].result(timeout=20)) == ([0, 2], group)
    again.leave()


def test_the_environment_is_that_of_a_restarted_rank_of_torchrun(run) -> None:
    processes = run(4)
    processes[0].leave()
    Meeting(processes[1:], 2).group(1, 2)
    group = TrainingGroup(3, 1, [1, 2, 3], [], None)
    environment = processes[3].environment(group)
    host, port = processes[3].known[1].address
    assert environment == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "MEGALITE_GENERATION": f"run 3 {host}:{port} {host}:{processes[3].known[2].address[1]}",
    }


def part(iteration: int, number: int) -> HeldPart:
    return HeldPart(iteration, f"save {iteration}", 3, number)


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        ({0: [], 1: [], 2: [], 3: []}, [0, 1]),  # the same node
        ({0: [], 2: [], 3: []}, [0, 2]),  # the leader, and the node that is whole
        ({0: [part(4, 0)], 1: [part(4, 0)], 3: [part(4, 1), part(4, 2)]}, [0, 3]),
        (
            {0: [part(9, 0)], 1: [], 3: [part(9, 1), part(9, 2)]},
            [0, 1],
        ),  # later than the run's last iteration
        # The newest save needs three processes: an older one is whole with two.
        (
            {0: [part(6, 0), part(4, 0)], 1: [part(6, 1)], 2: [part(6, 2)], 3: [part(4, 1), part(4, 2)]},
            [0, 3],
        ),
        ({0: [part(4, 0)], 3: [part(4, 1)], 1: []}, [0, 1]),  # a part is lost
    ],
)
def test_a_group_has_the_newest_save_that_its_size_allows(run, held, chosen) -> None:
    assert run(4)[0]._chosen(held, 2, reached=8) == chosen


def test_processes_that_cannot_train_end_with_the_same_error(run) -> None:
    results = Meeting(run(3), 0).results
    for each in results.values():
        with pytest.raises(UserError, match="3 of 3 ranks are left, which the run's layout does not fit"):
            each.result(timeout=20)


def test_a_spare_ends_with_the_status_of_the_run(run) -> None:
    processes = run(2)
    meeting = Meeting(processes, 1)
    meeting.group(0)
    processes[0].end(75)
    with pytest.raises(SystemExit) as end:
        meeting.results[1].result(timeout=20)
    assert end.value.code == 75


def test_a_meeting_does_not_wait_for_a_process_that_never_arrives(run) -> None:
    processes = run(3)
    assert Meeting(processes[:2], 3).group(0, 1).spares == []
    assert processes[0].lost == {2}


def test_of_two_parts_without_a_network_between_them_the_first_goes_on_first(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half of a group finds that the other one's hosts do not answer, though its processes live."""
    monkeypatch.setattr(regroup, "_CUT_OFF_SECONDS", 6.0)
    monkeypatch.setattr(processes, "_CONNECT_SECONDS", 0.3)
    first = run(4)
    Meeting(first, 4).group(0, 1, 2, 3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):  # and the queue is full
            for each in first:
                for number in {0, 1, 2, 3} - {each.own, each.own ^ 1}:
                    each.known[number] = each.known[number]._replace(address=address)
            others = Meeting(first[2:], 4)
            Meeting(first[:2], 4).group(0, 1)
            assert not others.results[2].done()
            others.group(2, 3)


def test_spares_that_reach_no_rank_do_not_take_its_place(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of both ranks do not answer: they may train on, and hold the lease."""
    monkeypatch.setattr(processes, "_CONNECT_SECONDS", 0.3)
    first = run(4)
    meeting = Meeting(first, 2)
    assert meeting.group(0, 1).spares == [2, 3]
    wait_until(lambda: all(list(each.ranks) == [0, 1] for each in first))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            for each in first[2:]:
                for number in (0, 1):
                    each.known[number] = each.known[number]._replace(address=address)
            for each in first[:2]:
                each.leave()
            group = meeting.group(2, 3)
    assert not group.supersedes
    assert first[2].environment(group)["MEGALITE_GENERATION"].startswith("run 0 ")


def test_a_process_that_begins_again_is_waited_for_and_does_not_lead(run) -> None:
    processes = run(3)
    for other in processes[1:]:
        processes[0].connect(other.own).set("coming/-1/0", "")
    address = processes[0].known[0].address
    processes[0].leave()
    meeting = Meeting(processes[1:], 3)
    time.sleep(1.0)
    store, _ = _open_store_at(*address)
    again = Processes("run", 0, processes[0].known, store, None, {})
    assert again.meet(Arrival(), lambda n: n) == meeting.results[1].result(timeout=20)
    assert list(meeting.results[2].result(timeout=20).ranks) == [0, 1, 2]
    again.leave()


def joining(launch: Launch, of: Processes, lr: str = "1.0") -> Processes | None:
    """A process of another launch that finds this one of the run."""
    host, port = of.known[of.own].address
    return Processes.of_run(launch, "run", ["127.0.0.1:9", f"{host}:{port}"], {"--lr": lr})


def test_processes_of_another_launch_join(run) -> None:
    """Two of them, which come to a run of two; then its leader is lost."""
    first = run(2)
    group = Meeting(first, 4).group(0, 1)
    joiners = [joining(Launch(rank, 2, rank, 2), first[1]) for rank in (1, 0)]
    late, early = joiners
    assert early is not None
    assert late is not None
    assert late.own == early.own + 1  # neighbours, whoever comes first
    waiting = Meeting(joiners, 4).results

    def sees_them(number: int, size: int) -> bool:
        return first[number].can_grow(group, lambda n: min(n, size))

    wait_until(lambda: sees_them(0, 4))
    assert not sees_them(0, 4)  # until others come
    assert not sees_them(1, 4)  # it does not lead
    meeting = Meeting(first, 4)
    meeting.results |= waiting
    second = meeting.group(0, 1, early.own, late.own)
    assert first[1].known == {**first[0].known, **second.joined}
    assert early.environment(second)["LOCAL_WORLD_SIZE"] == "2"
    assert (first[1].num_launched, early.num_launched) == (2, 2)
    assert [*joining(Launch(0, 1, 0, 1), first[1]).ranks] == [*second.ranks]
    first[0].leave()
    Meeting([first[1], *joiners], 4).group(1, early.own, late.own)
    for each in joiners:
        each.leave()


def test_a_process_that_joins_interrupts_no_run_that_it_cannot_enlarge(run) -> None:
    (first,) = run(1)
    group = Meeting([first], 1).group(0)
    joiner = joining(Launch(0, 1, 0, 1), first)
    result = Meeting([joiner], 1).results[joiner.own]
    time.sleep(0.5)
    assert not first.can_grow(group, lambda number: 1)
    first.end(0)
    with pytest.raises(SystemExit):
        result.result(timeout=20)
    joiner.leave()


def test_a_process_that_joins_finds_the_next_leader(run) -> None:
    first = run(2)
    Meeting(first, 4).group(0, 1)
    joiner = joining(Launch(0, 1, 0, 1), first[0])
    waiting = Meeting([joiner], 4).results[joiner.own]
    time.sleep(0.5)
    first[0].leave()
    alone = Meeting(first[1:], 1).group(1)
    wait_until(lambda: first[1].can_grow(alone, lambda number: number))
    assert list(Meeting(first[1:], 4).results[1].result(timeout=20).ranks) == [1, joiner.own]
    assert list(waiting.result(timeout=20).ranks) == [1, joiner.own]
    joiner.leave()


def test_a_meeting_of_too_few_waits_for_those_that_the_lost_leader_knew(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup, "_SETTLE_SECONDS", 5.0)
    first = run(2)
    Meeting(first, 4).group(0, 1)
    joiner = joining(Launch(0, 1, 0, 1), first[0])
    waiting = Meeting([joiner], 4).results[joiner.own]
    time.sleep(0.5)
    first[0].leave()
    group = first[1].meet(Arrival(), lambda number: number if number >= 2 else 0)
    assert list(group.ranks) == [1, joiner.own]
    assert waiting.result(timeout=20) == group
    joiner.leave()


def test_a_process_joins_only_the_run_of_the_lease_with_its_settings(run) -> None:
    (first,) = run(1)
    launch = Launch(0, 1, 0, 1)
    host, port = first.known[0].address
    assert Processes.of_run(launch, "another run", [f"{host}:{port}"], {}) is None
    with pytest.raises(UserError, match=r"another --lr; --lr is 2.0 here and 1.0 there"):
        joining(launch, first, lr="2.0")
    joiner = joining(launch, first)
    first.leave()
    with pytest.raises(UserError, match="the processes of the run in --save have ended"):
        joiner.meet(Arrival(), lambda number: number)
    joiner.leave()


def watched(processes: Sequence[Processes], group: TrainingGroup) -> list[LossWatch]:
    return [LossWatch(each, group) for each in processes]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_processes_notice_a_lost_one_and_leave_their_connections(run) -> None:
    processes = run(3)
    group = TrainingGroup(0, 0, [0, 1, 2], [], None)
    watches = watched(processes, group)
    listener = socket.create_server(("127.0.0.1", 0))
    waiting = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    freed = threading.Event()
    threading.Thread(target=lambda: (waiting.recv(1), freed.set()), daemon=True).start()
    time.sleep(0.5)
    assert all(each.alarmed_at is None for each in watches)
    watches[2].close()
    processes[2].leave()
    del watches[2]
    wait_until(lambda: all(each.alarmed_at is not None for each in watches))
    assert freed.wait(10)
    assert all(each.is_loss(RuntimeError("other")) for each in watches)
    for each in watches:
        each.close()
    for each in (listener, waiting, other):
        each.close()


def test_a_process_that_hangs_is_lost(run) -> None:
    processes = run(2)
    watches = watched(processes, TrainingGroup(0, 0, [0, 1], [], None))
    watches[1].close()  # its heartbeat stops, and its store lives on
    wait_until(lambda: watches[0].alarmed_at is not None)
    watches[0].close()


STORE = """
from megalite.distributed.processes import _open_store_at
store, (_, port) = _open_store_at("127.0.0.1", 0)
print(port, flush=True)
input()
"""


def test_a_process_that_is_stopped_is_lost_though_it_accepts_connections(run) -> None:
    processes = run(2)
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        processes[0].known[1] = Process("0", 1, ("127.0.0.1", int(other.stdout.readline())))
        (watch,) = watched(processes[:1], TrainingGroup(0, 0, [0, 1], [], None))
        try:
            time.sleep(0.5)
            other.send_signal(signal.SIGSTOP)
            wait_until(lambda: watch.alarmed_at is not None)
            assert processes[0].meet(Arrival(), lambda number: number).ranks == [0]
        finally:
            watch.close()
            other.kill()


def test_an_error_of_all_processes_is_no_loss(run) -> None:
    watches = watched(run(2), TrainingGroup(0, 0, [0, 1], [], None))
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda each: each.is_loss(ValueError("in all")), watches)] == [False, False]
    assert watches[0].is_loss(RuntimeError("[gloo/pair.cc] Connection closed by peer"))
    wait_until(lambda: watches[1].alarmed_at is not None)
    for each in watches:
        each.close()
