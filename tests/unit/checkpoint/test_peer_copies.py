"""Copies are on other nodes, and arrive whole or with an error that names who is missing."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from megalite.checkpoint import peer_copies
from megalite.checkpoint.folder import SaveError
from megalite.checkpoint.peer_copies import PeerCopies, read_domains
from megalite.utils.errors import UserError


def copies_of(node_of: list[int], num_copies: int) -> list[PeerCopies]:
    return [PeerCopies(rank, node_of, num_copies) for rank in range(len(node_of))]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1, 1), (2, 2, 2), (8,) * 16, (3, 1, 2)], ids=str)
def test_each_copy_is_on_another_node(sizes: tuple[int, ...]) -> None:
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    for num_copies in range(1, len(sizes)):
        every = copies_of(node_of, num_copies)
        for rank, copies in enumerate(every):
            assert len({node_of[rank], *(node_of[to] for to in copies.to)}) == num_copies + 1
            assert all(rank in every[to].sources for to in copies.to)
        assert sum(len(copies.sources) for copies in every) == num_copies * len(node_of)
        if len(set(sizes)) == 1:
            assert {len(copies.sources) for copies in every} == {num_copies}


def test_copies_are_far_away() -> None:
    assert [copies.to for copies in copies_of([0, 0, 1, 1, 2, 2, 3, 3], 1)][:3] == [[4], [5], [6]]
    assert copies_of([0, 1, 2, 3, 4, 5], 2)[1].to == [3, 5]


@pytest.mark.parametrize("domains", ["ababab", "aaabbb", "abcabc", "aabbcc"])
def test_copies_are_in_other_domains(domains: str) -> None:
    node_of = [rank // 2 for rank in range(12)]
    domain_of = [domains[node] for node in node_of]
    for rank in range(12):
        copies = PeerCopies(rank, node_of, 1, domain_of)
        assert [domain_of[to] for to in copies.to] != [domain_of[rank]]
        assert copies.unsafe == []


def test_a_domain_with_most_of_the_nodes_is_unsafe() -> None:
    copies = PeerCopies(0, [0, 1, 2, 3], 1, ["a", "a", "b", "a"])
    assert len(copies.unsafe) == 2  # of three nodes of a, one has its copy in b
    assert PeerCopies(0, [0, 1, 2, 3], 2, ["a", "a", "b", "a"]).unsafe == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1 r1\nn2\n", "line 2: 'n2': write a host and its rack or switch in each"),
        ("n1 r1 r2", "line 1: 'n1 r1 r2'"),
        ("n1 r1\n\nn1 r2  # again", "line 3: 'n1 r2  # again'"),
        (None, "cannot be read"),
    ],
)
def test_mistakes_in_a_file_of_domains(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "domains"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as error:
        read_domains(file)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_of_domains(tmp_path: Path) -> None:
    (tmp_path / "domains").write_text("# racks\nn1 r1\n\n  n2\tr2  # the second\n")
    assert read_domains(tmp_path / "domains") == {"n1": "r1", "n2": "r2"}


def test_copies_need_as_many_other_nodes() -> None:
    with pytest.raises(UserError, match="--peer-copies 2 needs 3 nodes, and the ranks see 2 folders"):
        PeerCopies(0, [0, 0, 2, 2], 2)


FILES = {"run.json": b"{}", "rank_00000.safetensors": bytes(range(256)) * 100_000, "empty.safetensors": b""}


def part_in(folder: Path) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def exchange(pair: list[PeerCopies], folder: Path, addresses: list[str]) -> list[BaseException | None]:
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(each.exchange, addresses, part_in(folder / f"own{rank}"), [folder / f"of{1 - rank}"])
            for rank, each in enumerate(pair)
        ]
        return [each.exception() for each in running]


@pytest.fixture
def pair() -> list[PeerCopies]:
    return copies_of([0, 1], 1)


def call(address: str, message: bytes) -> socket.socket:
    host, port, _ = address.split()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(message)
    return connection


def header(address: str, rank: int, files: dict[str, int]) -> bytes:
    return json.dumps({"token": address.split()[2], "rank": rank, "files": files}).encode() + b"\n"


def test_parts_arrive_and_strangers_are_turned_away(tmp_path: Path, pair: list[PeerCopies]) -> None:
    for _ in range(2):  # an inbox opens again for each save
        addresses = [each.open_inbox() for each in pair]
    first = addresses[0]
    strangers = [
        call(first, b"GET / HTTP/1.1\r\n\r\n"),
        call(first, b"[" * 60_000 + b"\n"),
        call(first, header(first.replace(first.split()[2], "0" * 32), 1, {"run.json": 1})),
        call(first, header(first, 7, {"run.json": 1})),
        call(first, header(first, 1, {"../outside.safetensors": 1})),
        call(first, header(first, 1, {"other.py": 1})),
    ]
    assert exchange(pair, tmp_path, addresses) == [None, None]
    for rank in range(2):
        found = {each.name: each.read_bytes() for each in (tmp_path / f"of{rank}").iterdir()}
        assert found == FILES
    assert not (tmp_path / "outside.safetensors").exists()
    for each in (*strangers, *pair):
        each.close() if isinstance(each, socket.socket) else each.close_inbox()
    with pytest.raises(ConnectionRefusedError):
        call(first, b"")


def test_a_slow_sender_does_not_hold_up_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 arrives first at rank 0, and sends nothing until rank 2's copy is there."""
    monkeypatch.setattr(peer_copies, "_SILENCE_SECONDS", 10.0)
    copies = copies_of([0, 1, 2], 2)[0]
    address = copies.open_inbox()
    part, folders = part_in(tmp_path / "own"), [tmp_path / "of1", tmp_path / "of2"]
    with ThreadPoolExecutor(1) as pool, call(address, header(address, 1, {"run.json": 2})) as slow:
        others = copies_of([0, 1, 2], 2)[1:]
        running = pool.submit(copies.exchange, ["", *(each.open_inbox() for each in others)], part, folders)
        peer_copies._send(part, 2, 0, address)
        deadline = time.monotonic() + 10.0
        while not (folders[1] / "run.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (folders[1] / "run.json").exists()
        slow.sendall(b"{}")
        for each in others:
            each.close_inbox()
        running.result()
    copies.close_inbox()
    assert (folders[0] / "run.json").read_bytes() == b"{}"
    assert {each.name: each.read_bytes() for each in folders[1].iterdir()} == FILES


def test_strangers_do_not_hold_up_ranks(
    tmp_path: Path, pair: list[PeerCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is silent, and one sends a byte now and then."""
    monkeypatch.setattr(peer_copies, "_HEADER_SECONDS", 0.2)
    monkeypatch.setattr(peer_copies, "_SILENCE_SECONDS", 2.0)
    addresses = [each.open_inbox() for each in pair]
    stops = threading.Event()

    def send_slowly() -> None:
        with call(addresses[0], b"") as connection, suppress(OSError):
            while not stops.wait(0.05):
                connection.sendall(b"[")

    with call(addresses[0], b""), ThreadPoolExecutor(1) as pool:
        pool.submit(send_slowly)
        assert exchange(pair, tmp_path, addresses) == [None, None]
        stops.set()
    for each in pair:
        each.close_inbox()


def receive(copies: PeerCopies, folder: Path) -> None:
    for arrival in copies._arrivals({1: folder}):
        peer_copies._receive_part(*arrival)


def test_a_sender_that_is_gone_is_named(
    tmp_path: Path, pair: list[PeerCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_copies, "_SILENCE_SECONDS", 0.2)
    address = pair[0].open_inbox()
    with pytest.raises(SaveError, match=r"no copy of rank 1's part arrived within 0\.2 s"):
        receive(pair[0], tmp_path / "late")
    with call(address, header(address, 1, {"run.json": 100}) + b"{"), pytest.raises(SaveError) as error:
        receive(pair[0], tmp_path / "silent")
    assert str(error.value) == "the copy of rank 1's part broke off (timed out)"
    call(address, header(address, 1, {"run.json": 100}) + b"{").close()
    with pytest.raises(SaveError, match="rank 1 broke off the copy of its part"):
        receive(pair[0], tmp_path / "dead")
    pair[0].close_inbox()
    with pytest.raises(
        SaveError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1, port \d+ \(Connection refused"
    ):
        peer_copies._send(part_in(tmp_path / "own"), 1, 0, address)


def test_a_keeper_that_cannot_store_its_copy_says_why(tmp_path: Path, pair: list[PeerCopies]) -> None:
    (tmp_path / "of0").mkdir()  # so that rank 1 cannot make it
    first, second = exchange(pair, tmp_path, [each.open_inbox() for each in pair])
    assert first is None
    assert isinstance(second, FileExistsError)
