"""A checkpoint written by all ranks: aside, synced, then moved to its name; `latest` moves last.

A run that dies at any moment of it leaves what it saved before, and a full or lost disk too: nothing old is
deleted before the new checkpoint is whole. See `manifest` for what is in its folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.exchange import Answer, Exchange, SaveError
from megalite.checkpoint.folder import LATEST, name_of, partial_of, prune, put_in_place, remove_leftovers
from megalite.checkpoint.identity import identity_of
from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.manifest import FileRecord, TensorRecord, seal, write_synced
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.tensor_writer import Piece, write_file
from megalite.config import Config, to_yaml
from megalite.data.corpus_record import DataRecord
from megalite.log import log
from megalite.topology import AXES, Topology

_SPLIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds besides tensors, the same on every rank.

    Attributes:
        description: run.json's.
        config_text: config.yaml's.
    """

    iteration: int
    description: Mapping[str, Any]
    config_text: str

    @staticmethod
    def of(
        progress: Progress, config: Config, topology: Topology, data: DataRecord | None = None
    ) -> Contents:
        """Those of a run that has come so far, and reads these data."""
        description = {
            "progress": dataclasses.asdict(progress),
            "layout": {axis: getattr(topology, axis).size for axis in AXES},
            **identity_of(config, topology, data),
        }
        return Contents(progress.iteration, description, to_yaml(config))


@dataclass(frozen=True)
class Save:
    """One checkpoint for every layout, and this rank's share of it.

    Attributes:
        folder: of all the run's checkpoints, which every rank sees.
        file_name: of this rank's file, or with a number of one of two: no other rank has the same.
        keep_last, keep_every: which older ones to keep; None for both: all.
        lease: on the folder; None where no other run can write there.
    """

    folder: Path
    contents: Contents
    pieces: Mapping[str, Piece]
    file_name: str
    keep_last: int | None = None
    keep_every: int | None = None
    lease: FolderLease | None = None

    @property
    def final(self) -> Path:
        return self.folder / name_of(self.contents.iteration)

    def run(self, exchange: Exchange) -> None:
        """Writes it; every rank calls this.

        Raises:
            SaveError: some rank could not; raised on every rank, and nothing half-written is left.
        """
        aside: Path | None = None
        try:
            aside = self.folder / exchange.from_first("begin", self._begin)
            answers = exchange.to_first("files", lambda: self._write(aside))
            exchange.from_first("end", lambda: self._commit(aside, answers))
        except SaveError as error:
            if exchange.is_first and aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            raise SaveError(
                f"checkpoint {self.final} cannot be written ({error}): free space or change --save; "
                "every rank must see the folder"
            ) from None

    def _begin(self) -> str:
        """Make the folder that all ranks write to, and return its name.

        A folder of checkpoints that is gone is not made anew: of a lost file system the empty mount point is
        left.
        """
        self._check_lease()
        remove_leftovers(self.folder)
        aside = partial_of(self.final)
        aside.mkdir()
        return aside.name

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _write(self, aside: Path) -> str:
        """Writes a large share as two files at once: it takes as long as their hashing, a core for each."""
        hands = _hands(self.pieces)
        names = [self.file_name]
        if len(hands) > 1:
            stem = self.file_name.removesuffix(".safetensors")
            names = [f"{stem}_{number}.safetensors" for number in range(len(hands))]
        if not hands:
            return "[]"
        with ThreadPoolExecutor(len(hands), "write-checkpoint") as pool:
            files = pool.map(lambda name, hand: write_file(aside / name, hand), names, hands)
            return json.dumps([_listed(file) for file in files])

    def _commit(self, aside: Path, answers: Sequence[Answer]) -> str:
        files = [file for answer in answers for file in _files_of(answer)]
        contents = self.contents
        seal(aside, contents.description, contents.config_text, files)
        sync_folder(aside)
        self._check_lease()
        put_in_place(aside, self.final)
        sync_folder(self.folder)
        replace_text(self.folder / LATEST, self.final.name + "\n", self._check_lease)
        self._check_lease()
        self._prune()
        return ""

    def _prune(self) -> None:
        try:
            pruned = prune(self.folder, self.contents.iteration, self.keep_last, self.keep_every)
        except OSError as error:
            log.warning("an old checkpoint in %s cannot be deleted: %s", self.folder, error)
        else:
            for name in pruned:
                log.info("deleted checkpoint %s", self.folder / name)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(file: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    """Replaces a file in one step, for good: a reader sees the old text or the new.

    Args:
        check: called right before that step; what it raises leaves the old text.
    """
    aside = partial_of(file)
    try:
        write_synced(aside, text)
        check()
        os.replace(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def _hands(pieces: Mapping[str, Piece]) -> list[dict[str, Piece]]:
    """The pieces in one file's hands, or in two of about the same size where there is much; none of none."""
    if sum(piece.num_bytes for piece in pieces.values()) < _SPLIT_BYTES:
        return [dict(pieces)] if pieces else []
    hands: list[dict[str, Piece]] = [{}, {}]
    sizes = [0, 0]
    for name in sorted(pieces, key=lambda name: (-pieces[name].num_bytes, name)):
        lighter = int(sizes[1] < sizes[0])
        hands[lighter][name] = pieces[name]
        sizes[lighter] += pieces[name].num_bytes
    return [hand for hand in hands if hand]


def _listed(file: FileRecord) -> list[Any]:
    """A file for JSON."""
    return [file.name, file.sha256, {name: record.record() for name, record in file.tensors.items()}]


def _files_of(answer: Answer) -> Iterator[FileRecord]:
    """The files that a rank wrote.

    Raises:
        SaveError: it could not.
    """
    if not answer.is_well:
        raise SaveError(answer.text)
    for name, sha256, tensors in json.loads(answer.text):
        records = {tensor: TensorRecord.from_record(record) for tensor, record in tensors.items()}
        yield FileRecord(name, sha256, records)
