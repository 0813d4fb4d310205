"""Checkpoints that each rank keeps for itself, on its node's disk or in its memory: quick, and soon gone.

    DIR/5f3a…/rank_00003/iter_0000010/   all that rank 3 of the run 5f3a… holds, sealed as any checkpoint

Such a save needs no file system that all nodes share, and of each node only what its own ranks write. It
helps a run that is started again on the same nodes, in the same layout: another one finds its own tensors
in no single rank's folder, and takes the run's last persistent checkpoint, as it does where a node is gone.

A rank keeps its older save until the new one is whole on every rank, so two at the most. A persistent save
that is whole makes those up to its iteration superfluous: they are deleted.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megalite.checkpoint.exchange import Answer, Exchange, SaveError
from megalite.checkpoint.folder import iterations_in, name_of, partial_of, put_in_place, remove_leftovers
from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    damage_of,
    dtype_name,
    read_manifest,
    seal,
)
from megalite.checkpoint.place import Place, Tensors
from megalite.checkpoint.save import Contents, replace_text, sync_folder
from megalite.checkpoint.shares import all_of
from megalite.checkpoint.tensor_writer import Piece, write_file
from megalite.config import CheckpointConfig
from megalite.errors import UserError
from megalite.folders import make_writable, read_regular
from megalite.log import log
from megalite.topology import Topology

FLAG = "--non-persistent-local-ckpt-dir"
_RUN_ID = "run_id"
_ID = re.compile(r"([0-9a-f]{16}) ([0-9]+)")


@dataclass(frozen=True)
class LocalSaves:
    """Those of one rank.

    Attributes:
        folder: this rank's.
    """

    folder: Path
    topology: Topology

    @staticmethod
    def of(config: CheckpointConfig, topology: Topology) -> LocalSaves | None:
        """This run's, whose name is in its folder of persistent checkpoints; every rank calls it.

        Returns:
            None where the config wants none.

        Raises:
            UserError: a folder cannot be written; on every rank.
        """
        if config.non_persistent_save_interval is None:
            return None
        assert config.save is not None
        assert config.non_persistent_local_ckpt_dir is not None
        run = [""]
        with topology.agreed():
            if topology.rank == 0:
                run = [_run_id(Path(config.save))]
        dist.broadcast_object_list(run)
        folder = Path(config.non_persistent_local_ckpt_dir) / run[0] / f"rank_{topology.rank:05d}"
        with topology.agreed():
            make_writable(folder, FLAG)
        return LocalSaves(folder, topology)

    def newest(self, tensors: Tensors) -> tuple[int, Manifest] | None:
        """The newest iteration that every rank has whole, each in its own layout; every rank calls it.

        Every byte of it has been read and found as it was saved. What is left out is told.

        Args:
            tensors: all that this rank holds, by name.
        """
        whole: dict[int, Manifest] = {}
        problems: dict[int, str] = {}
        with self.topology.agreed():  # nothing is raised: it waits for those who read longest
            for iteration, name in self._found().items():
                try:
                    whole[iteration] = self._whole(self.folder / name, tensors)
                except (UserError, OSError) as error:
                    problems[iteration] = f"rank {self.topology.rank}: {error}"
        seen: list[tuple[list[int], dict[int, str]]] = [([], {})] * self.topology.world_size
        dist.all_gather_object(seen, (list(whole), problems))
        common = set.intersection(*(set(iterations) for iterations, _ in seen))
        _tell_left_out(seen, common)
        newest = max(common, default=None)
        return None if newest is None else (newest, whole[newest])

    def remove_up_to(self, iteration: int) -> None:
        """Deletes what a whole persistent checkpoint has made superfluous, on this rank."""
        self._remove([number for number in self._found() if number <= iteration])

    def keep_only(self, iteration: int) -> None:
        """Deletes all but one iteration's, and what a larger world of ranks has left."""
        self._remove([number for number in self._found() if number != iteration])
        for folder in self.folder.parent.glob("rank_*"):
            number = folder.name.removeprefix("rank_")
            if number.isdecimal() and int(number) >= self.topology.world_size:
                shutil.rmtree(folder, ignore_errors=True)

    def keep_newest(self, number: int) -> None:
        """Deletes all but the newest few."""
        self._remove(list(self._found())[:-number])

    def remove_all(self) -> None:
        """Deletes the run's whole folder on this node: every rank has come to the run's end."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _found(self) -> dict[int, str]:
        try:
            return iterations_in(self.folder)
        except OSError:
            return {}

    def _remove(self, iterations: Sequence[int]) -> None:
        found = self._found()
        for iteration in iterations:
            shutil.rmtree(self.folder / found[iteration], ignore_errors=True)

    def _whole(self, checkpoint: Path, tensors: Tensors) -> Manifest:
        """Raises: UserError: it is damaged, or holds anything but what this rank needs."""
        manifest = read_manifest(checkpoint)
        if problems := damage_of(manifest, manifest.files):
            raise DamagedCheckpoint(checkpoint, problems)
        saved = {
            name: [(record.dtype, record.place) for record in records]
            for name, records in manifest.tensors.items()
        }
        here = {name: [_kind(all_of(tensor, self.topology))] for name, tensor in tensors.items()}
        if saved != here:
            raise UserError(f"{checkpoint} is of another layout or precision")
        return manifest


@dataclass(frozen=True)
class LocalSave:
    """One save of a rank's own.

    Attributes:
        saves: where it goes.
        pieces: all that the rank holds.
        lease: on the run's --save, which names the local folder too; None where no other run can write there.
    """

    saves: LocalSaves
    contents: Contents
    pieces: Mapping[str, Piece]
    lease: FolderLease | None = None

    @property
    def final(self) -> Path:
        return self.saves.folder / name_of(self.contents.iteration)

    def run(self, exchange: Exchange) -> None:
        """Writes it, and deletes older ones once it is whole on every rank; every rank calls this.

        Raises:
            SaveError: some rank could not; on every rank, and each keeps its older ones.
        """
        aside, is_named = partial_of(self.final), False
        try:
            exchange.from_first("begin", self._check_lease)
            written = exchange.to_first("files", lambda: self._write(aside))
            exchange.from_first("written", lambda: _verdict(written) + self._check_lease())
            is_named = True
            named = exchange.to_first("names", lambda: self._name(aside))
            exchange.from_first("end", lambda: _verdict(named))
        except SaveError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if is_named:
                shutil.rmtree(self.final, ignore_errors=True)
            raise SaveError(
                f"checkpoint {self.final} cannot be written ({error}): free space or change {FLAG}"
            ) from None
        self.saves.keep_only(self.contents.iteration)

    def _check_lease(self) -> str:
        if self.lease is not None:
            with suppress(OSError):  # a local save needs nothing of the shared file system
                self.lease.check()
        return ""

    def _write(self, aside: Path) -> str:
        remove_leftovers(self.final.parent)
        self.saves.keep_newest(2)  # there are more only where ranks could not agree
        aside.mkdir()
        file = write_file(aside / f"{self.saves.folder.name}.safetensors", self.pieces)
        seal(aside, self.contents.description, self.contents.config_text, [file])
        sync_folder(aside)
        return ""

    def _name(self, aside: Path) -> str:
        put_in_place(aside, self.final)
        return ""


def _kind(piece: Piece) -> tuple[str, Place | None]:
    return dtype_name(piece.tensor.dtype), piece.place


def _verdict(answers: Sequence[Answer]) -> str:
    for answer in answers:
        if not answer.is_well:
            raise SaveError(answer.text)
    return ""


def _tell_left_out(seen: Sequence[tuple[list[int], dict[int, str]]], common: set[int]) -> None:
    """Warns of each iteration that some rank has and that is not whole on all of them."""
    for iteration in sorted({each for whole, bad in seen for each in (*whole, *bad)} - common):
        problems = [bad[iteration] for _, bad in seen if iteration in bad]
        missing = [rank for rank, (whole, bad) in enumerate(seen) if iteration not in {*whole, *bad}]
        if missing:
            problems.append(f"{len(missing)} ranks have none, rank {missing[0]} first")
        log.warning("the non-persistent checkpoint of iteration %d is left out: %s", iteration, problems[0])


def _run_id(save: Path) -> str:
    """The name of the run that saves to a folder, made at its first start.

    It is written with the folder's inode: a copy of the folder has another one, and is another run.

    Raises:
        UserError: the folder cannot be written.
    """
    file = save / _RUN_ID
    with suppress(OSError, UnicodeDecodeError):
        found = _ID.fullmatch(read_regular(file, 1 << 10).decode().strip())
        if found and int(found[2]) == save.stat().st_ino:
            return found[1]
    make_writable(save, "--save")
    name = secrets.token_hex(8)
    try:
        replace_text(file, f"{name} {save.stat().st_ino}\n")
    except OSError as error:
        raise UserError(f"--save {save} cannot be written ({error.strerror}): give another folder") from None
    return name
