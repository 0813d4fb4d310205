"""Save to each rank's own folder, on the disk or in the memory of its node: fast, but not persistent.

    DIR/5f3a…/rank_00003/iter_0000010/   all tensors of rank 3 of the run 5f3a…, sealed like any checkpoint

Such a save needs no shared file system, and each node writes only the tensors of its own ranks. It
helps a run that restarts on the same nodes with the same layout. In another layout, a rank's folder does not
hold the tensors that the rank needs, so the run loads its last persistent checkpoint, as it does if a node is
lost.

A rank keeps its older save until the new one is complete on every rank, so it has at most two. A complete
persistent save replaces the local saves up to its iteration, which are deleted.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.folder import (
    iterations_in,
    name_of,
    put_in_place,
    remove_leftovers,
    replace_text,
    sync_folder,
)
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
from megalite.checkpoint.save import Contents, whole_piece
from megalite.checkpoint.save_agreement import SaveAgreement, SaveError
from megalite.checkpoint.stored_run import StoredRun
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import CheckpointConfig
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable, partial_name, read_regular
from megalite.utils.log import log

FLAG = "--non-persistent-local-ckpt-dir"
_RUN_ID = "run_id"
_ID = re.compile(r"([0-9a-f]{16}) (.+)")


@dataclass(frozen=True)
class LocalSaves:
    """Local saves of one rank.

    Attributes:
        folder: folder of this rank.
    """

    folder: Path
    topology: Topology

    @staticmethod
    def of(config: CheckpointConfig, topology: Topology) -> LocalSaves | None:
        """Return the local saves of this run, whose id is in its --save folder; every rank must call it.

        Returns:
            The local saves; None if the config has none.

        Raises:
            UserError: a folder cannot be written. Every rank raises it.
        """
        if config.non_persistent_save_interval is None:
            return None
        assert config.save is not None
        assert config.non_persistent_local_ckpt_dir is not None
        with topology.agreed():
            own = _run_id(config.save) if topology.rank == 0 else ""
        run = topology.world.object_of_first(own, "the run's id")
        folder = Path(config.non_persistent_local_ckpt_dir) / run / f"rank_{topology.rank:05d}"
        with topology.agreed():
            make_writable(folder, FLAG)
        return LocalSaves(folder, topology)

    def newest(self, tensors: Tensors) -> tuple[int, Manifest] | None:
        """Return the newest iteration that all ranks have saved in this layout; every rank must call it.

        All its bytes have been read and verified. Skipped iterations are logged.

        Args:
            tensors: all tensors of this rank, by name.
        """
        whole: dict[int, Manifest] = {}
        problems: dict[int, str] = {}
        with self.topology.agreed():  # nothing raises here; wait for the slowest reader
            for iteration, name in self._found().items():
                try:
                    whole[iteration] = self._verified(self.folder / name, tensors)
                except (UserError, OSError) as error:
                    problems[iteration] = f"rank {self.topology.rank}: {error}"
        found = self.topology.world.gather_objects((list(whole), problems), "local saves")
        common = set.intersection(*(set(iterations) for iterations, _ in found))
        _warn_of_skipped(found, common)
        newest = max(common, default=None)
        return None if newest is None else (newest, whole[newest])

    def remove_up_to(self, iteration: int) -> None:
        """Delete this rank's saves up to the iteration of a complete persistent checkpoint."""
        self._remove([number for number in self._found() if number <= iteration])

    def keep_only(self, iteration: int) -> None:
        """Delete all saves except one iteration's, and the folders that a larger number of ranks has left."""
        self._remove([number for number in self._found() if number != iteration])
        for folder in self.folder.parent.glob("rank_*"):
            number = folder.name.removeprefix("rank_")
            if number.isdecimal() and int(number) >= self.topology.world_size:
                shutil.rmtree(folder, ignore_errors=True)

    def keep_newest(self, number: int) -> None:
        """Delete all saves except the newest."""
        self._remove(list(self._found())[:-number])

    def remove_all(self) -> None:
        """Delete the run's folder on this node, after every rank has reached the end of the run."""
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
            UserError: it is damaged, or does not hold exactly the tensors of this rank.
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
    """Local save of a rank.

    Attributes:
        saves: local saves of the rank.
        lease: lease on the --save folder, which also names the local folder; None if no other run can write
            there.
    """

    saves: LocalSaves
    contents: Contents
    lease: FolderLease | None = None

    @property
    def final(self) -> Path:
        return self.saves.folder / name_of(self.contents.iteration)

    def run(self, agreement: SaveAgreement, pieces: Mapping[str, FilePiece]) -> None:
        """Write the save, and delete older ones once it is complete on every rank; every rank must call this.

        Args:
            pieces: all pieces of the rank, in host memory.

        Raises:
            SaveError: a rank failed. Every rank raises it and keeps its older saves.
        """
        partial, is_renamed = partial_name(self.final), False
        try:
            agreement.from_first("begin", self._check_lease)
            agreement.from_all("files", lambda: self._write(partial, pieces), lambda _: self._check_lease())
            is_renamed = True
            agreement.from_all("names", lambda: put_in_place(partial, self.final))
        except SaveError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_renamed:
                shutil.rmtree(self.final, ignore_errors=True)
            raise SaveError(
                f"checkpoint {self.final} cannot be written ({error}): free space or change {FLAG}"
            ) from None
        self.saves.keep_only(self.contents.iteration)

    def _check_lease(self) -> None:
        if self.lease is not None:
            with suppress(OSError):  # a local save does not need the shared file system
                self.lease.check()

    def _write(self, partial: Path, pieces: Mapping[str, FilePiece]) -> None:
        remove_leftovers(self.final.parent)
        self.saves.keep_newest(2)  # there are more only if the ranks did not agree
        partial.mkdir()
        file = write_file(partial / f"{self.saves.folder.name}.safetensors", pieces)
        seal(partial, self.contents.description, self.contents.config_text, [file])
        sync_folder(partial)


def _warn_of_skipped(found: Sequence[tuple[list[int], dict[int, str]]], common: set[int]) -> None:
    """Warn about each iteration that some ranks have but that is not complete on all ranks."""
    for iteration in sorted({each for whole, bad in found for each in (*whole, *bad)} - common):
        problems = [bad[iteration] for _, bad in found if iteration in bad]
        missing = [rank for rank, (whole, bad) in enumerate(found) if iteration not in {*whole, *bad}]
        if missing:
            problems.append(f"{len(missing)} ranks have none, rank {missing[0]} first")
        log.warning("the non-persistent checkpoint of iteration %d is skipped: %s", iteration, problems[0])


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
    own = str(run) if run else str(Path(save).stat().st_ino)
    run_id = secrets.token_hex(8)
    text = f"{run_id} {own}\n"
    try:
        with suppress(FileNotFoundError, UnicodeDecodeError, *(() if run else (OSError,))):
            content = run.objects.read(_RUN_ID) if run else read_regular(Path(save) / _RUN_ID, 1 << 10)
            found = _ID.fullmatch(content.decode().strip())
            if found and found[2] == own:
                return found[1]
        if run:
            run.objects.write(_RUN_ID, text.encode())
        else:
            replace_text(Path(save) / _RUN_ID, text)
    except OSError as error:
        raise UserError(f"--save {save} cannot be written ({error.strerror}): pass another folder") from None
    return run_id
