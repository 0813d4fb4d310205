"""Copy a rank's part of a local save to other nodes, over connections of its own, from any thread.

Process groups serve one thread each, and end with a layout. These connections last for one copy.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from megalite.checkpoint.folder import SaveError
from megalite.checkpoint.manifest import SUMS, TEXTS
from megalite.checkpoint.tensor_files import DiskFile
from megalite.distributed.rendezvous import GLOO_INTERFACE, own_address
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError, counted
from megalite.utils.files import parse_json

_CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 1 << 16
_HEADER_SECONDS = 5.0
"""Seconds in which a sender must say which rank it is."""
_SILENCE_SECONDS = 20.0
"""Seconds without a connection or a byte after which a rank gives up a copy."""
_FILES = ".safetensors"


class PeerCopies:
    """Copies of each rank's part on other nodes.

    Nodes that are neighbours often share a rack or a switch, their failure domain, and ranks are usually
    numbered along them. So the copies of a part are on nodes far away from each other: with one copy, half of
    the nodes away. If the domains are known, nodes count in their order.

    Args:
        node_of: the node of each rank, as a number.
        domain_of: failure domain of each rank; empty if they are not known.

    Attributes:
        to: ranks that keep a copy of this rank's part.
        sources: ranks whose parts this rank keeps a copy of.
        unsafe: ranks whose part has all its copies in its own domain.

    Raises:
        UserError: there are not enough nodes.
    """

    def __init__(
        self, rank: int, node_of: Sequence[int], num_copies: int, domain_of: Sequence[str] = ()
    ) -> None:
        ranks_of: dict[int, list[int]] = {}
        for each, node in enumerate(node_of):
            ranks_of.setdefault(node, []).append(each)
        nodes = list(ranks_of.values())
        if domain_of:
            nodes.sort(key=lambda ranks: domain_of[ranks[0]])
        if num_copies >= len(nodes):
            raise UserError(
                f"--peer-copies {num_copies} needs {num_copies + 1} nodes, and the ranks see "
                f"{counted(len(nodes), 'folder')} for non-persistent saves: pass one on each node's own disk "
                "or in its memory, or fewer copies"
            )
        shifts = [copy * len(nodes) // (num_copies + 1) for copy in range(1, num_copies + 1)]
        keepers: dict[int, list[int]] = {}
        for number, ranks in enumerate(nodes):
            others = [nodes[(number + shift) % len(nodes)] for shift in shifts]
            for place, each in enumerate(ranks):
                keepers[each] = [other[place % len(other)] for other in others]
        self._rank = rank
        self._inbox: socket.socket | None = None
        self._token = ""  # senders must know it
        self.to = keepers[rank]
        self.unsafe = [
            each
            for each, others in keepers.items()
            if domain_of and {domain_of[other] for other in others} == {domain_of[each]}
        ]
        self.sources = [source for source in sorted(keepers) if rank in keepers[source]]

    def open_inbox(self) -> str:
        """Listen for copies on the interface that leads to the other ranks; return the address for senders.

        Raises:
            OSError: it has no free port.
        """
        self.close_inbox()
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._inbox, self._token = socket.create_server((host, 0), family=family), secrets.token_hex(16)
        port = self._inbox.getsockname()[1]
        return f"{host} {port} {self._token}"

    def close_inbox(self) -> None:
        """Stop listening; a second call does nothing."""
        if self._inbox is not None:
            self._inbox.close()
        self._inbox = None

    def exchange(self, addresses: Sequence[str], part: Path, folders: Sequence[Path]) -> None:
        """Send this rank's part to its keepers, and receive those of `sources`; every rank must call this.

        Args:
            addresses: what `open_inbox` has returned on each rank.
            part: folder of this rank's part.
            folders: folders for the parts of `sources`, which are created.

        Raises:
            SaveError: a rank is gone, or does not answer.
            OSError: a file cannot be read or written.
        """
        missing = dict(zip(self.sources, folders, strict=True))
        with ThreadPoolExecutor(len(self.to) + len(missing), "peer-copies") as pool:
            running = [pool.submit(_send, part, self._rank, to, addresses[to]) for to in self.to]
            running += [pool.submit(_receive_part, *arrival) for arrival in self._arrivals(missing)]
            for each in running:
                each.result()

    def _arrivals(self, missing: dict[int, Path]) -> Iterator[tuple[socket.socket, _Header, Path]]:
        """Yield a connection from each rank that is missing, with the folder for its part."""
        assert self._inbox is not None
        deadline = time.monotonic() + _SILENCE_SECONDS
        while missing:
            self._inbox.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                connection, _ = self._inbox.accept()
            except TimeoutError:
                raise SaveError(
                    f"no copy of rank {min(missing)}'s part arrived within {_SILENCE_SECONDS:g} s"
                ) from None
            header = _header(connection, self._token)
            if header is not None and header.rank in missing:
                connection.settimeout(_SILENCE_SECONDS)
                yield connection, header, missing.pop(header.rank)
            else:  # no rank of this run
                connection.close()


def read_domains(file: Path) -> dict[str, str]:
    """Return the failure domain of each host in a file of --peer-domains.

    Raises:
        UserError: it cannot be read, or a line is wrong.
    """
    domains: dict[str, str] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--peer-domains {file} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not (words := line.partition("#")[0].split()):
            continue
        if len(words) != 2 or words[0] in domains:
            raise UserError(
                f"--peer-domains {file}, line {number}: {line.strip()!r}: write a host and its rack or "
                "switch in each line, and each host once"
            )
        domains[words[0]] = words[1]
    return domains


def nodes_of_ranks(folder: Path, name: str, topology: Topology) -> list[int]:
    """Return the node of each rank, named by the first rank that sees the same folder; a collective.

    Ranks see whose files are in the folder, so this holds for any machines, containers and file systems.

    Args:
        name: a new name, the same on every rank.

    Raises:
        OSError: the folder cannot be written.
    """
    own = folder / f".{name}.{topology.rank}"
    with topology.agreed():  # every rank's file is there at the end
        own.touch()
    seen = min(int(each.suffix[1:]) for each in folder.glob(f".{name}.*"))
    nodes = topology.world.gather_objects(seen, "nodes")
    own.unlink()
    return nodes


def _send(part: Path, rank: int, to: int, address: str) -> None:
    host, port, token = address.split()
    files = sorted(part.iterdir())
    header = {"token": token, "rank": rank, "files": {file.name: file.stat().st_size for file in files}}
    try:
        connection = socket.create_connection((host, int(port)), _SILENCE_SECONDS)
    except OSError as error:
        raise SaveError(
            f"rank {rank} cannot reach rank {to} at {host}, port {port} ({error.strerror or error}); if this "
            f"is no address between the nodes, set {GLOO_INTERFACE} to the interface of one"
        ) from None
    with connection, suppress(OSError):  # the receiver reports that its copy is not whole
        connection.sendall(json.dumps(header).encode() + b"\n")
        for file in files:
            with open(file, "rb") as content:
                connection.sendfile(content)


class _Header(NamedTuple):
    rank: int
    files: Mapping[str, int]


def _header(connection: socket.socket, token: str) -> _Header | None:
    """Return the header of a part; None if the sender is no rank of this run."""
    text, deadline = b"", time.monotonic() + _HEADER_SECONDS
    with suppress(OSError):
        while not text.endswith(b"\n") and len(text) < _MAX_HEADER_BYTES:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            if not (more := connection.recv(1)):
                return None
            text += more
    with suppress(ValueError, TypeError, LookupError):
        header = parse_json(text)
        names = {*header["files"]} - {SUMS, *TEXTS}
        is_known = secrets.compare_digest(header["token"], token)
        if is_known and all(os.path.basename(each) == each and each.endswith(_FILES) for each in names):
            return _Header(header["rank"], header["files"])
    return None


def _receive_part(connection: socket.socket, header: _Header, folder: Path) -> None:
    with connection:
        folder.mkdir()
        for name, size in header.files.items():
            _receive(connection, folder / name, size, header.rank)


def _receive(connection: socket.socket, path: Path, size: int, source: int) -> None:
    with closing(DiskFile(path)) as file, memoryview(bytearray(min(size, _CHUNK_BYTES))) as chunk:
        while size:
            try:
                received = connection.recv_into(chunk[: min(size, len(chunk))])
            except OSError as error:
                raise SaveError(f"the copy of rank {source}'s part broke off ({error})") from None
            if not received:
                raise SaveError(f"rank {source} broke off the copy of its part")
            file.write(chunk[:received])
            size -= received
        file.finish()
