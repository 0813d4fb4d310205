"""Save on each rank's node, on its disk or in its memory: fast, but not persistent.

    DIR/5f3a…/rank_00003/iter_0000010/   part of rank 3 of a save of the run 5f3a…, sealed like a checkpoint

A part has the tensors that the rank would write to a checkpoint. Such a save needs no shared file system:
each node has the parts of its own ranks and, with --peer-copies, copies of other nodes' parts, which are the
same folders with the same names. A restarted run looks for the parts on all nodes, and the ranks send each
other what they need (see `relayout`). So ranks may have moved, and their number and layout may have changed.
If parts are lost with a node and have no copy, the run loads its last persistent checkpoint.

A rank keeps its older save until the new one is complete on every rank, so it has at most two. A complete
persistent save replaces the local saves up to its iteration, which are deleted.
"""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megalite.checkpoint.folder import (
    SaveError,
    iterations_in,
    name_of,
    put_in_place,
    remove_leftovers,
    replace_text,
    sync_folder,
)
from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.manifest import DamagedCheckpoint, Manifest, damage_of, read_manifest, seal
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.peer_copies import PeerCopies, nodes_of_ranks, read_domains
from megalite.checkpoint.save import Contents, SaveAgreement, plan_save
from megalite.checkpoint.stored_run import StoredRun, iterations_at
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import CheckpointConfig
from megalite.distributed.rendezvous import restart_count
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError, counted, few
from megalite.utils.files import make_writable, partial_name, read_regular
from megalite.utils.log import THIS_RANK, log

FLAG = "--non-persistent-local-ckpt-dir"
_RUN_ID = "run_id"
_PART = "part"
"""Key of run.json under which a part names its save."""
_FOLDER = re.compile(r"rank_[0-9]{5,9}")
_ID = re.compile(r"([0-9a-f]{16}) (.+)")


class _Part(NamedTuple):
    """Part of a save that is on a node.

    Attributes:
        save: name of the save, which is new each time.
        source: rank that wrote it.
        node: a node that has it.
    """

    iteration: int
    save: str
    num_parts: int
    source: int
    node: int
    num_bytes: int


@dataclass(frozen=True)
class LocalSaves:
    """Local saves of a run, as one rank sees them.

    Attributes:
        root: folder of the run on this rank's node.
        node_of: number of each rank's node: its first rank.
        copies: copies on other nodes; None without.
    """

    root: Path
    topology: Topology
    node_of: Sequence[int]
    copies: PeerCopies | None

    @staticmethod
    def of(config: CheckpointConfig, topology: Topology) -> LocalSaves:
        """Return the local saves of this run, whose id is in its --save folder; every rank must call it.

        The config must have some: see `CheckpointConfig.saves_locally`.

        Raises:
            UserError: a folder cannot be written, or there are not enough nodes for the copies. Every rank
                raises it.
        """
        assert config.save is not None
        assert config.non_persistent_local_ckpt_dir is not None
        with topology.agreed():
            own = _run_id(config.save) if topology.rank == 0 else ""
        run, name = topology.world.object_of_first((own, secrets.token_hex(8)), "the run's id")
        root = Path(config.non_persistent_local_ckpt_dir) / run
        with topology.agreed():
            make_writable(root, FLAG)
            make_writable(root / _folder_of(topology.rank), FLAG)
        node_of = nodes_of_ranks(root, name, topology)
        return LocalSaves(root, topology, node_of, _peer_copies(config, root, node_of, topology))

    @property
    def folder(self) -> Path:
        """Return the folder of this rank's parts."""
        return self.root / _folder_of(self.topology.rank)

    def check_space(self, tensors: Tensors) -> None:
        """Log how much a node needs for two saves, and warn if one has less; every rank must call this."""
        free = 0
        if self._leads:
            with suppress(OSError):  # what is there will be replaced
                files = [each for each in self.root.rglob("*") if each.is_file()]
                free = shutil.disk_usage(self.root).free + sum(each.stat().st_size for each in files)
        part = sum(piece.num_bytes for piece in plan_save(tensors, self.topology).values())
        mine = part, self.copies.sources if self.copies else [], free
        found = self.topology.world.gather_objects(mine, "space for local saves")
        needed = dict.fromkeys(self.node_of, 0)
        for node, (own, sources, _) in zip(self.node_of, found, strict=True):
            needed[node] += 2 * (own + sum(found[source][0] for source in sources))
        most = max(needed, key=needed.__getitem__)
        log.info("non-persistent saves need up to %.3f GB on a node", needed[most] / 1e9)
        if lacking := [node for node in needed if needed[node] > found[node][2]]:
            log.warning(
                "%s has %.3f GB for non-persistent saves on %s, rank %d's first, and two of them need %.3f: "
                "pass a folder with more space%s",
                *(FLAG, found[lacking[0]][2] / 1e9, counted(len(lacking), "node"), lacking[0]),
                needed[lacking[0]] / 1e9,
                ", or fewer --peer-copies" if self.copies else "",
            )

    def newest(self) -> tuple[int, list[Manifest]] | None:
        """Return the newest iteration of which the nodes have all parts; every rank must call this.

        Its bytes have been read and verified. Skipped iterations are logged.

        Returns:
            The iteration, and the parts that this rank is to load: each part is loaded by one rank.
        """
        with self.topology.agreed():
            mine = list(self._parts()) if self._leads else []
        saves: dict[tuple[int, str], list[_Part]] = {}
        for parts in self.topology.world.gather_objects(mine, "parts of local saves"):
            for part in parts:
                saves.setdefault((part.iteration, part.save), []).append(part)
        for iteration, save in sorted(saves, reverse=True):
            try:
                return iteration, self._whole(saves[iteration, save])
            except UserError as error:
                log.warning("the non-persistent checkpoint of iteration %d is skipped: %s", iteration, error)
        return None

    def begin(self, iteration: int) -> None:
        """Delete what a run that begins at an iteration does not need: other saves, and unfinished ones."""
        if self._leads:
            for folder in _folders_in(self.root):
                with suppress(OSError):
                    remove_leftovers(folder)
        self.keep_only(iteration)

    def remove_up_to(self, iteration: int) -> None:
        """Delete the node's saves up to the iteration of a complete persistent checkpoint."""
        self._remove(lambda number: number <= iteration)

    def keep_only(self, iteration: int) -> None:
        """Delete the node's saves of other iterations, and the empty folders of a larger number of ranks."""
        self._remove(lambda number: number != iteration)
        if self._leads:
            for folder in _folders_in(self.root):
                if _rank_of(folder) >= self.topology.world_size:
                    with suppress(OSError):
                        folder.rmdir()

    def remove_all(self) -> None:
        """Delete the run's folder on this node, after every rank has reached the end of the run."""
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def _leads(self) -> bool:
        """Return whether this rank is the node's first, which lists and deletes saves for all of them."""
        return self.node_of[self.topology.rank] == self.topology.rank

    def _remove(self, is_old: Callable[[int], bool]) -> None:
        if self._leads:
            for iteration, part in parts_in(self.root):
                if is_old(iteration):
                    shutil.rmtree(part, ignore_errors=True)

    def _parts(self) -> Iterator[_Part]:
        """Yield the parts on this node; log those that are damaged."""
        for iteration, folder in parts_in(self.root):
            try:
                manifest = read_manifest(folder)
                size = sum((folder / file).stat().st_size for file in manifest.files)
                yield _Part(iteration, *part_of(manifest), self.topology.rank, size)
            except DamagedCheckpoint as error:
                log.warning("%s", error, extra=THIS_RANK)
            except (OSError, LookupError, TypeError, ValueError):
                log.warning("non-persistent checkpoint %s is not complete", folder, extra=THIS_RANK)

    def _whole(self, parts: list[_Part]) -> list[Manifest]:
        """Deal the parts of a save to the ranks; read and verify this rank's.

        Raises:
            UserError: a part is on no node, or all its copies are damaged; raised on every rank.
        """
        while True:
            readers, manifests, bad = self._readers(parts), [], {}
            with self.topology.agreed():  # nothing raises here; wait for the slowest reader
                for source in (source for source, rank in readers.items() if rank == self.topology.rank):
                    try:
                        manifests.append(self._verified(source, parts[0].iteration))
                    except (UserError, OSError, LookupError) as error:
                        bad[source] = str(error)
            found = self.topology.world.gather_objects(bad, "damaged parts")
            if not any(found):
                return manifests
            for rank, problems in enumerate(found):
                for source, problem in problems.items():
                    log.warning("rank %d's part is not used: %s", source, problem)
                    parts = [
                        part for part in parts if (part.source, part.node) != (source, self.node_of[rank])
                    ]

    def _readers(self, parts: Sequence[_Part]) -> dict[int, int]:
        """Return the rank that reads each source's part: itself if its node has it, else the least busy.

        Raises:
            UserError: a part is on no node.
        """
        readers: dict[int, int] = {}
        loads = [0] * self.topology.world_size
        missing = set(range(parts[0].num_parts)) if parts else {0}
        for source in sorted({part.source for part in parts}):
            nodes = {part.node: part.num_bytes for part in parts if part.source == source}
            ranks = [rank for rank, node in enumerate(self.node_of) if node in nodes]
            readers[source] = source if source in ranks else min(ranks, key=loads.__getitem__)
            loads[readers[source]] += max(nodes.values())
        if missing := missing - readers.keys():
            raise UserError(
                f"no node has a whole part of {counted(len(missing), 'rank')}, rank {min(missing)} first"
            )
        return readers

    def _verified(self, source: int, iteration: int) -> Manifest:
        """Read and verify a part on this node.

        Raises:
            UserError: it is damaged.
        """
        folder = self.root / _folder_of(source)
        manifest = read_manifest(folder / iterations_in(folder)[iteration])
        if problems := damage_of(manifest, manifest.files):
            raise DamagedCheckpoint(manifest.folder, problems)
        return manifest


def _folders_in(root: Path) -> list[Path]:
    return sorted(folder for folder in root.glob("rank_*") if _FOLDER.fullmatch(folder.name))


def parts_in(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the iteration and the folder of each part on this node."""
    for folder in _folders_in(root):
        with suppress(OSError):
            for iteration, name in iterations_in(folder).items():
                yield iteration, folder / name


def part_of(manifest: Manifest) -> tuple[str, int, int]:
    """Return the name of a part's save, the number of its parts, and the rank that wrote this one."""
    record = manifest.description[_PART]
    return str(record["save"]), int(record["num_parts"]), _rank_of(manifest.folder.parent)


def _peer_copies(
    config: CheckpointConfig, root: Path, node_of: Sequence[int], topology: Topology
) -> PeerCopies | None:
    """Return the copies on other nodes. A restarted run that has lost nodes makes fewer; a collective.

    Raises:
        UserError: a new run does not have enough nodes, or the domain of a host is not known.
    """
    number, most = config.peer_copies, len(set(node_of)) - 1
    if number > most:
        restarts = restart_count() > 0 or any(root.glob("rank_*/iter_*"))
        if topology.rank == 0 and config.save is not None:
            with suppress(OSError):  # the run reports it when it saves
                run = StoredRun.at(config.save, config.save_stage)
                restarts |= bool(iterations_at(run or Path(config.save)))
        if any(topology.world.gather_objects(restarts, "restarts")):
            log.warning(
                "--peer-copies %d: only %d are made, as the run is restarted on fewer nodes", number, most
            )
            number = most
    if not number:
        return None
    copies = PeerCopies(topology.rank, node_of, number, _domains_of_ranks(config.peer_domains, topology))
    if copies.unsafe:
        log.warning(
            "all copies of the parts of %s are in the same domain of --peer-domains, rank %d's first: it has "
            "too many of the nodes",
            *(counted(len(copies.unsafe), "rank"), copies.unsafe[0]),
        )
    return copies


def _domains_of_ranks(file: str | None, topology: Topology) -> list[str]:
    """Return the failure domain of each rank; empty without a file; a collective."""
    if file is None:
        return []
    with topology.agreed():
        domains = read_domains(Path(file)) if topology.rank == 0 else {}
    domains = topology.world.object_of_first(domains, "failure domains")
    hosts = topology.world.gather_objects(socket.gethostname(), "hosts")
    if missing := sorted(set(hosts) - domains.keys()):
        raise UserError(f"--peer-domains {file} has no line for {few(missing)}: write one for each host")
    return [domains[host] for host in hosts]


@dataclass(frozen=True)
class LocalSave:
    """Local save of a rank.

    Attributes:
        lease: lease on the --save folder, which also names the local folder; None if no other run can write
            there.
    """

    saves: LocalSaves
    contents: Contents
    lease: FolderLease | None = None

    @property
    def final(self) -> Path:
        return self._final_of(self.saves.topology.rank)

    def run(self, agreement: SaveAgreement, pieces: Mapping[str, FilePiece]) -> None:
        """Write the save, and delete older ones once it is complete on every rank; every rank must call this.

        Args:
            pieces: pieces that this rank writes, in host memory.

        Raises:
            SaveError: a rank failed. Every rank raises it and keeps its older saves.
        """
        copies, own_rank = self.saves.copies, self.saves.topology.rank
        finals = [self._final_of(rank) for rank in (own_rank, *(copies.sources if copies else ()))]
        partials = [partial_name(final) for final in finals]
        is_renamed, advice = False, f"cannot be written ({{}}): free space or change {FLAG}"
        try:
            save = agreement.from_first("begin", self._begin)
            addresses = agreement.from_all(
                "files",
                lambda: self._write(partials, pieces, save),
                lambda each: self._checked("\n".join(each)),
            ).split("\n")
            if copies is not None:
                begin = time.monotonic()
                advice = f"cannot be copied ({{}}): nodes must reach each other, and have space in {FLAG}"
                agreement.from_all("copies", lambda: copies.exchange(addresses, partials[0], partials[1:]))
                log.info(
                    "the part of rank %d, %.3f GB, is copied to rank %s in %.1f s",
                    own_rank,
                    sum(piece.num_bytes for piece in pieces.values()) / 1e9,
                    ", ".join(map(str, copies.to)),
                    time.monotonic() - begin,
                )
            is_renamed = True
            agreement.from_all("names", lambda: _put_in_place(partials, finals))
        except SaveError as error:
            for folder in (*partials, *(finals if is_renamed else ())):
                shutil.rmtree(folder, ignore_errors=True)
            raise SaveError(f"checkpoint {self.final} {advice.format(error)}") from None
        finally:
            if copies is not None:
                copies.close_inbox()
        self.saves.keep_only(self.contents.iteration)

    def _final_of(self, rank: int) -> Path:
        return self.saves.root / _folder_of(rank) / name_of(self.contents.iteration)

    def _begin(self) -> str:
        return self._checked(secrets.token_hex(8))

    def _checked(self, text: str) -> str:
        """Check that this run still has the lease; return the text."""
        if self.lease is not None:
            with suppress(OSError):  # a local save does not need the shared file system
                self.lease.check()
        return text

    def _write(self, partials: Sequence[Path], pieces: Mapping[str, FilePiece], save: str) -> str:
        """Write this rank's part to the first folder; return the address for copies of others."""
        for folder in partials:
            folder.parent.mkdir(exist_ok=True)
            remove_leftovers(folder.parent)
        own = partials[0]
        own.mkdir()
        file = write_file(own / f"{self.saves.folder.name}.safetensors", pieces)
        record = {"save": save, "num_parts": self.saves.topology.world_size}
        seal(own, {**self.contents.description, _PART: record}, self.contents.config_text, [file])
        sync_folder(own)
        return self.saves.copies.open_inbox() if self.saves.copies else ""


def _put_in_place(partials: Sequence[Path], finals: Sequence[Path]) -> None:
    for partial, final in zip(partials, finals, strict=True):
        put_in_place(partial, final)


def _folder_of(rank: int) -> str:
    return f"rank_{rank:05d}"


def _rank_of(folder: Path) -> int:
    return int(folder.name.removeprefix("rank_"))


def _run_id(save: str) -> str:
    """Return the id of the run that saves to a folder or URL. It is created when the run first starts.

    It is stored with the folder's inode, or the URL: a copy of the folder has another one, and is another
    run.

    Raises:
        UserError: the folder cannot be written.
    """
    run = StoredRun.at(save)
    if run is None:
        make_writable(Path(save), "--save")
    run_id = secrets.token_hex(8)
    try:
        if known := known_run_id(save):
            return known
        text = f"{run_id} {run or Path(save).stat().st_ino}\n"
        if run:
            run.objects.write(_RUN_ID, text.encode())
        else:
            replace_text(Path(save) / _RUN_ID, text)
    except OSError as error:
        raise UserError(f"--save {save} cannot be written ({error.strerror}): pass another folder") from None
    return run_id


def known_run_id(save: str) -> str | None:
    """Return the id of the run that saves to a folder or URL; None before its first start.

    Raises:
        OSError: object storage cannot be read.
    """
    run = StoredRun.at(save)
    with suppress(FileNotFoundError, UnicodeDecodeError, *(() if run else (OSError,))):
        content = run.objects.read(_RUN_ID) if run else read_regular(Path(save) / _RUN_ID, 1 << 10)
        found = _ID.fullmatch(content.decode().strip())
        if found and found[2] == str(run or Path(save).stat().st_ino):
            return found[1]
    return None
