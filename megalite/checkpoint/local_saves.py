"""Save to each rank's own folder, on its node's disk or in its memory: fast, but not kept.

    DIR/5f3a…/rank_00003/iter_0000010/   all that rank 3 of the run 5f3a… holds, sealed like any checkpoint

Such a save needs no file system that all nodes share, and each node writes only what its own ranks hold. It
helps a run that is started again on the same nodes, in the same layout: in another layout no single rank's
folder holds a rank's tensors, and the run loads its last persistent checkpoint, as it does if a node is gone.

A rank keeps its older save until the new one is complete on every rank, so at most two. A complete persistent
save makes those up to its iteration superfluous: they are deleted.
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

from megalite.checkpoint.folder import iterations_in, name_of, put_in_place, remove_leftovers
from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    damage_of,
    dtype_name,
    read_manifest,
    seal,
)
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.save import Contents, replace_text, sync_folder, whole_piece
from megalite.checkpoint.save_agreement import SaveAgreement, SaveAnswer, SaveError
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import CheckpointConfig
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.files import make_writable, partial_name, read_regular
from megalite.log import log

FLAG = "--non-persistent-local-ckpt-dir"
_RUN_ID = "run_id"
_ID = re.compile(r"([0-9a-f]{16}) ([0-9]+)")


@dataclass(frozen=True)
class LocalSaves:
    """Manage the local saves of one rank.

    Attributes:
        folder: this rank's.
    """

    folder: Path
    topology: Topology

    @staticmethod
    def of(config: CheckpointConfig, topology: Topology) -> LocalSaves | None:
        """Return this run's local saves, named in its folder of persistent checkpoints; every rank calls it.

        Returns:
            None if the config has no such saves.

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
        """Return the newest iteration that every rank has saved fully in its layout; every rank calls it.

        Every byte of it has been read and verified. Skipped iterations are logged.

        Args:
            tensors: all that this rank holds, by name.
        """
        whole: dict[int, Manifest] = {}
        problems: dict[int, str] = {}
        with self.topology.agreed():  # nothing is raised: it waits for the rank that reads longest
            for iteration, name in self._found().items():
                try:
                    whole[iteration] = self._verified(self.folder / name, tensors)
                except (UserError, OSError) as error:
                    problems[iteration] = f"rank {self.topology.rank}: {error}"
        found: list[tuple[list[int], dict[int, str]]] = [([], {})] * self.topology.world_size
        dist.all_gather_object(found, (list(whole), problems))
        common = set.intersection(*(set(iterations) for iterations, _ in found))
        _warn_of_skipped(found, common)
        newest = max(common, default=None)
        return None if newest is None else (newest, whole[newest])

    def remove_up_to(self, iteration: int) -> None:
        """Delete the saves that a complete persistent checkpoint makes superfluous, on this rank."""
        self._remove([number for number in self._found() if number <= iteration])

    def keep_only(self, iteration: int) -> None:
        """Delete all but one iteration's save, and what a larger world of ranks has left."""
        self._remove([number for number in self._found() if number != iteration])
        for folder in self.folder.parent.glob("rank_*"):
            number = folder.name.removeprefix("rank_")
            if number.isdecimal() and int(number) >= self.topology.world_size:
                shutil.rmtree(folder, ignore_errors=True)

    def keep_newest(self, number: int) -> None:
        """Delete all but the newest saves."""
        self._remove(list(self._found())[:-number])

    def remove_all(self) -> None:
        """Delete the run's folder on this node, when every rank has reached the run's end."""
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

    def _verified(self, checkpoint: Path, tensors: Tensors) -> Manifest:
        """Read and verify a checkpoint.

        Raises:
            UserError: it is damaged, or does not hold exactly what this rank needs.
        """
        manifest = read_manifest(checkpoint)
        if problems := damage_of(manifest, manifest.files):
            raise DamagedCheckpoint(checkpoint, problems)
        saved = {
            name: [(record.dtype, record.range) for record in records]
            for name, records in manifest.tensors.items()
        }
        pieces = {name: whole_piece(tensor, self.topology) for name, tensor in tensors.items()}
        here = {name: [(dtype_name(piece.tensor.dtype), piece.range)] for name, piece in pieces.items()}
        if saved != here:
            raise UserError(f"{checkpoint} has another layout or precision")
        return manifest


@dataclass(frozen=True)
class LocalSave:
    """Write one save of a rank's own.

    Attributes:
        saves: where it is written.
        pieces: all that the rank holds.
        lease: on the run's --save, which names the local folder too; None if no other run can write there.
    """

    saves: LocalSaves
    contents: Contents
    pieces: Mapping[str, FilePiece]
    lease: FolderLease | None = None

    @property
    def final(self) -> Path:
        return self.saves.folder / name_of(self.contents.iteration)

    def run(self, agreement: SaveAgreement) -> None:
        """Write it, and delete older ones once it is complete on every rank; every rank calls this.

        Raises:
            SaveError: some rank could not; on every rank, and each keeps its older ones.
        """
        partial, is_renamed = partial_name(self.final), False
        try:
            agreement.from_first("begin", self._check_lease)
            written = agreement.to_first("files", lambda: self._write(partial))
            agreement.from_first("written", lambda: _joined(written) + self._check_lease())
            is_renamed = True
            renamed = agreement.to_first("names", lambda: self._rename(partial))
            agreement.from_first("end", lambda: _joined(renamed))
        except SaveError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_renamed:
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

    def _write(self, partial: Path) -> str:
        remove_leftovers(self.final.parent)
        self.saves.keep_newest(2)  # there are more only if ranks could not agree
        partial.mkdir()
        file = write_file(partial / f"{self.saves.folder.name}.safetensors", self.pieces)
        seal(partial, self.contents.description, self.contents.config_text, [file])
        sync_folder(partial)
        return ""

    def _rename(self, partial: Path) -> str:
        put_in_place(partial, self.final)
        return ""


def _joined(answers: Sequence[SaveAnswer]) -> str:
    """Return the ranks' results, all empty.

    Raises:
        SaveError: a rank failed.
    """
    return "".join(answer.result() for answer in answers)


def _warn_of_skipped(found: Sequence[tuple[list[int], dict[int, str]]], common: set[int]) -> None:
    """Warn of each iteration that some rank has and that is not complete on all of them."""
    for iteration in sorted({each for whole, bad in found for each in (*whole, *bad)} - common):
        problems = [bad[iteration] for _, bad in found if iteration in bad]
        missing = [rank for rank, (whole, bad) in enumerate(found) if iteration not in {*whole, *bad}]
        if missing:
            problems.append(f"{len(missing)} ranks have none, rank {missing[0]} first")
        log.warning("the non-persistent checkpoint of iteration %d is skipped: %s", iteration, problems[0])


def _run_id(save: Path) -> str:
    """Return the id of the run that saves to a folder; it is made at the run's first start.

    It is written with the folder's inode: a copy of the folder has another inode, and is another run.

    Raises:
        UserError: the folder cannot be written.
    """
    file = save / _RUN_ID
    with suppress(OSError, UnicodeDecodeError):
        found = _ID.fullmatch(read_regular(file, 1 << 10).decode().strip())
        if found and int(found[2]) == save.stat().st_ino:
            return found[1]
    make_writable(save, "--save")
    run_id = secrets.token_hex(8)
    try:
        replace_text(file, f"{run_id} {save.stat().st_ino}\n")
    except OSError as error:
        raise UserError(f"--save {save} cannot be written ({error.strerror}): pass another folder") from None
    return run_id
