"""Write each element of a checkpoint once; replicas divide replicated elements among themselves.

The ranks agree on a save through the store, from any thread, without collectives. A collective from a second
thread would need its own group: a mesh of connections among all ranks that is idle between saves, and a
timeout that a slow disk exceeds. The messages are small. Every rank is already connected to the store, which
keeps them for as long as the slowest disk takes. Only rank 0 reads the answers of all ranks; the others read
its decision.
"""

from __future__ import annotations

import base64
import dataclasses
import heapq
import json
import shutil
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megalite.checkpoint.compatibility import compatibility_record
from megalite.checkpoint.folder import Retention, RunFolder, SaveError, name_of
from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.manifest import WRITTEN, FileRecord, TensorRecord, seal
from megalite.checkpoint.parameter_range import ParameterRange, Tensors
from megalite.checkpoint.progress import STATES, TrainingProgress
from megalite.checkpoint.stored_run import StoredRun
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import Config, to_yaml
from megalite.data.corpus_record import DataRecord
from megalite.distributed.agreement import at_work, wait_for_key
from megalite.distributed.axis import Axis
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.utils.hardware.gpus import device_name
from megalite.utils.log import log

if TYPE_CHECKING:
    from torch.distributed import Store

_DONE, _FAILED = "+", "-"


class _Answer(NamedTuple):
    """Outcome of a step of a save on one rank.

    Attributes:
        text: result of the step, or the error.
    """

    is_done: bool
    text: str

    def result(self) -> str:
        if not self.is_done:
            raise SaveError(self.text)
        return self.text


class SaveAgreement:
    """Messages about one save between the ranks.

    Args:
        name: name of the save, unique in the store.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self._store = store
        self._world_size = world_size
        self._prefix = f"megalite/{name}"
        self._keys: list[str] = []

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, step: str, action: Callable[[], str | None]) -> str:
        """Call `action` on rank 0 and return its result on every rank; None is returned as an empty text.

        Raises:
            SaveError: `action` raised, or rank 0 is gone. Every rank raises it.
        """
        key = self._key(step)
        self._keys.append(key)
        if self.is_first:
            answer = self._run(action)
            self._store.set(key, _packed(answer))
        elif wait_for_key(self._store, key):
            answer = _unpacked(self._store.get(key))
        else:
            answer = _Answer(False, "rank 0 does not answer: it is gone or hangs")
        return answer.result()

    def from_all(
        self,
        step: str,
        action: Callable[[], str | None],
        conclude: Callable[[Sequence[str]], str | None] = lambda results: None,
    ) -> str:
        """Call `action` on every rank, and then `conclude` with the results of all ranks on rank 0.

        Returns:
            The result of `conclude`, on every rank.

        Raises:
            SaveError: one of the calls raised, or a rank is gone. Every rank raises it.
        """
        answer, all_there = self._run(action), self._key(step, "all")
        self._store.set(self._key(step, self.rank), _packed(answer))
        if self._store.add(self._key(step, "number"), 1) == self._world_size:
            self._store.set(all_there, "")
        answers: list[_Answer] = []
        if self.is_first:
            self._keys += [all_there, self._key(step, "number")]
            wait_for_key(self._store, all_there)
            answers = [self._remove(self._key(step, rank), rank) for rank in range(self._world_size)]

        return self.from_first(f"after {step}", lambda: conclude([each.result() for each in answers]))

    def forget(self) -> None:
        """Delete the keys of the save from the store; call it after every rank has finished the save."""
        if self.is_first:
            with suppress(RuntimeError):
                for key in self._keys:
                    self._store.delete_key(key)

    def _run(self, action: Callable[[], str | None]) -> _Answer:
        try:
            with at_work(self._store):
                return _Answer(True, action() or "")
        except SaveError as error:
            return _Answer(False, str(error))
        except OSError as error:
            file = f": {error.filename}" if error.filename else ""
            return _Answer(False, f"rank {self.rank}: {error.strerror or error}{file}")
        except Exception:  # a bug here must not leave the other ranks waiting
            return _Answer(False, f"rank {self.rank} failed:\n{traceback.format_exc()}")

    def _remove(self, key: str, rank: int) -> _Answer:
        if not self._store.check([key]):
            return _Answer(False, f"rank {rank} does not answer: it is gone or hangs")
        answer = _unpacked(self._store.get(key))
        self._store.delete_key(key)
        return answer

    def _key(self, step: str, who: object = 0) -> str:
        return f"{self._prefix}/{step}/{who}"


def _packed(answer: _Answer) -> str:
    """Return an answer as compressed ASCII text; names and ranges of tensors compress to a tenth."""
    content = zlib.compress(answer.text.encode(), level=1)
    return (_DONE if answer.is_done else _FAILED) + base64.b64encode(content).decode()


def _unpacked(message: bytes) -> _Answer:
    text = zlib.decompress(base64.b64decode(message[1:])).decode()
    return _Answer(message[:1] == _DONE.encode(), text)


_CUT_BYTES = 16 << 20
"""Larger tensors are cut among replicas. The cut depends only on the tensor and the number of replicas, so
the two stages that hold a tied table cut it in the same way, and a reader finds two equal pieces."""


def plan_save(tensors: Tensors, topology: Topology, cut_bytes: int = _CUT_BYTES) -> dict[str, FilePiece]:
    """Return the pieces that this rank writes.

    It writes its own shards, a share of the bytes that all replicas hold, and the plain tensors if it is the
    first rank of a stage. Ranks that replicate a shard each write a share of it. The shares are equal up to
    one tensor of `cut_bytes`. Every rank computes the same division.

    Returns:
        Pieces by tensor name.
    """
    parts = {
        name: part
        for name, part in tensors.items()
        if isinstance(part, ParameterShard) and part.tensor.numel()
        if part.spec.parameter_axes.acts(topology)
    }
    pieces = {
        name: FilePiece(tensor)
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.numel() and topology.is_first_outside(topology.pp)
    }
    # The ranks that have the same elements: the replicas, or the replicas with the same shards.
    holders: dict[str, tuple[Axis | None, dict[str, ParameterShard]]] = {}
    for name, part in parts.items():
        replicas = part.spec.parameter_axes.replicas(topology)
        same = replicas if part.is_replicated else replicas.replicate
        holders.setdefault("" if same is None else same.name, (same, {}))[1][name] = part
    for same, held in holders.values():
        if same is None:
            pieces |= {name: whole_piece(part, topology) for name, part in held.items()}
            continue
        for name, start, end in _divide(held, same.size, cut_bytes)[same.rank]:
            pieces[name] = _cut(parts[name], start, end, topology)
    return pieces


def whole_piece(tensor: Tensor | ParameterShard, topology: Topology) -> FilePiece:
    """Return this rank's part of a tensor; a whole slice keeps its shape, other shards are flat."""
    if isinstance(tensor, Tensor):
        return FilePiece(tensor)
    elements = tensor.tensor.view(tensor.shape) if tensor.is_replicated else tensor.tensor
    return FilePiece(elements, ParameterRange.of(tensor, topology))


def _cut(part: ParameterShard, start: int, end: int, topology: Topology) -> FilePiece:
    """Return elements ``[start, end)`` of a slice or shard that is replicated."""
    whole = whole_piece(part, topology)
    if (start, end) == (0, part.tensor.numel()):
        return whole
    assert whole.range is not None
    at = part.start
    return FilePiece(part.tensor[start:end], dataclasses.replace(whole.range, start=at + start, end=at + end))


def _divide(
    parts: Mapping[str, ParameterShard | FilePiece], num_shares: int, cut_bytes: int
) -> list[list[tuple[str, int, int]]]:
    """Return (name, start, end) for each share, assigning the largest tensors first to the smallest share."""
    sizes = {name: part.tensor.numel() * part.tensor.element_size() for name, part in parts.items()}
    shares: list[list[tuple[str, int, int]]] = [[] for _ in range(num_shares)]
    loads = [(0, share) for share in range(num_shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        numel, size = parts[name].tensor.numel(), sizes[name]
        num_cuts = min(num_shares, max(1, -(-size // cut_bytes)))
        least = [heapq.heappop(loads) for _ in range(num_cuts)]
        for number, (load, share) in enumerate(least):
            start, end = numel * number // num_cuts, numel * (number + 1) // num_cuts
            shares[share].append((name, start, end))
            heapq.heappush(loads, (load + size * (end - start) // numel, share))
    return shares


_SPLIT_BYTES = 64 << 20
"""A rank with more bytes than this writes two files at once."""


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint other than tensors; they are the same on every rank.

    Attributes:
        description: content of run.json.
        config_text: content of config.yaml.
    """

    iteration: int
    description: Mapping[str, Any]
    config_text: str

    @staticmethod
    def of(
        progress: TrainingProgress,
        config: Config,
        topology: Topology,
        data: DataRecord | None = None,
        callbacks: Mapping[str, str] | None = None,
    ) -> Contents:
        """Return the contents for a run with this progress and data.

        Args:
            callbacks: states of its callbacks, from `recorded_state`, by name.
        """
        description = {
            "progress": dataclasses.asdict(progress),
            "layout": topology.sizes,
            "device": device_name(topology.device),
            **compatibility_record(config, topology, data),
            **({STATES: callbacks} if callbacks else {}),
        }
        return Contents(progress.iteration, description, to_yaml(config))


@dataclass(eq=False)
class Save:
    """Checkpoint that any layout can load.

    Attributes:
        folder: where the checkpoints of the run are.
        file_name: unique name for this rank's file, or for two files with numbers.
        retention: which older checkpoints to keep.
        lease: lease on the folder; None if no other run can write there.
        cleans_up: whether to delete what killed runs have uploaded.
        is_written: set once the tensors are in files, so that training may change them.
        is_staged: set once the files of all ranks are whole; what follows is the upload.
    """

    folder: RunFolder
    contents: Contents
    file_name: str
    retention: Retention
    lease: FolderLease | None = None
    cleans_up: bool = False
    is_written: threading.Event = field(default_factory=threading.Event)
    is_staged: threading.Event = field(default_factory=threading.Event)
    _completing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _is_complete: bool = field(default=False, init=False, repr=False)
    _is_left: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        return name_of(self.contents.iteration)

    @property
    def final(self) -> str:
        """Return the path or URL of the checkpoint."""
        return f"{self.folder}/{self.name}"

    def run(self, agreement: SaveAgreement, pieces: Mapping[str, FilePiece]) -> None:
        """Write the checkpoint; every rank must call this.

        Args:
            pieces: pieces that this rank writes, in host memory.

        Raises:
            SaveError: a rank failed. Every rank raises it, and no partial checkpoint remains, except for
                files that could not be uploaded: see `stored_run`.
        """
        start_time = time.time()
        partial: Path | None = None
        is_kept = False
        try:
            partial = self.folder.partial(agreement.from_first("begin", self._begin))
            agreement.from_all(
                "files",
                lambda: self._write(partial, pieces),
                lambda records: self._seal(partial, records, start_time),
            )
            is_kept = self.folder.uploads
            self.is_staged.set()
            if self.folder.uploads:
                agreement.from_all("upload", lambda: self._send(partial))
            agreement.from_first("publish", lambda: self._publish(partial))
            is_kept = False
        except SaveError as error:
            if is_kept:
                raise SaveError(
                    f"checkpoint {self.final} cannot be uploaded ({error}): its files stay in --save-stage, "
                    "and the next start of the run uploads them unless a later save is whole"
                ) from None
            raise SaveError(
                f"checkpoint {self.final} cannot be written ({error}): {self.folder.advice}"
            ) from None
        finally:
            if partial is not None and not is_kept and (agreement.is_first or self.folder.uploads):
                shutil.rmtree(partial, ignore_errors=True)  # by now renamed or uploaded, or useless

    def _begin(self) -> str:
        """Begin a save on rank 0, and return the name of the folder that all ranks write to."""
        self._check_lease()
        return self.folder.begin(self.name)

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _write(self, partial: Path, pieces: Mapping[str, FilePiece]) -> str:
        """Write this rank's pieces, and return the records of its files as JSON.

        With a core for each, two files at once take as long as hashing one of them.
        """
        files = [dict(pieces)] if pieces else []
        if sum(piece.num_bytes for piece in pieces.values()) >= _SPLIT_BYTES:
            shares = _divide(pieces, 2, sys.maxsize)
            files = [{name: pieces[name] for name, *_ in share} for share in shares if share]
        self.folder.join(partial)
        stem = self._stem(partial)
        names = [f"{stem}_{number}.safetensors" for number in range(len(files))]
        if len(files) == 1:
            names = [f"{stem}.safetensors"]
        if not files:
            self.is_written.set()
            return "[]"
        with ThreadPoolExecutor(len(files), "write-checkpoint") as pool:
            records = list(
                pool.map(
                    lambda name, pieces: write_file(partial / name, pieces, has_blocks=self.folder.uploads),
                    names,
                    files,
                )
            )
        self.is_written.set()
        return json.dumps(
            [
                [
                    file.name,
                    file.sha256,
                    {name: record.record() for name, record in file.tensors.items()},
                    file.blocks,
                ]
                for file in records
            ]
        )

    def _seal(self, partial: Path, records: Sequence[str], start_time: float) -> None:
        files = [
            FileRecord(
                name, sha256, {each: TensorRecord.from_record(part) for each, part in parts.items()}, blocks
            )
            for record in records
            for name, sha256, parts, blocks in json.loads(record)
        ]
        contents = self.contents
        # Both times in seconds since 1970: the dates of files change when a folder is copied.
        written = {"start_time": start_time, "end_time": time.time()}
        seal(partial, {**contents.description, WRITTEN: written}, contents.config_text, files)

    def _stem(self, partial: Path) -> str:
        return self.folder.file_stem(self.file_name.removesuffix(".safetensors"), partial)

    def _send(self, partial: Path) -> None:
        if isinstance(self.folder, StoredRun):
            self.folder.remove_staged(but=partial)  # an earlier save that could not be uploaded
        files = sorted(file.name for file in partial.glob(f"{self._stem(partial)}[._]*"))
        self.folder.send(partial, self.name, files)

    def leave(self) -> bool:
        """Keep rank 0 from completing the checkpoint from now on; return False if it is complete already."""
        with self._completing:
            self._is_left = True
            return not self._is_complete

    def _publish(self, partial: Path) -> None:
        with self._completing:
            if self._is_left:
                raise SaveError("the run has ended")
            self.folder.publish(partial, self.name, self._check_lease)
            self._is_complete = True
        self._check_lease()
        try:
            deleted = self.folder.prune(self.contents.iteration, self.retention, self.cleans_up)
            for name in deleted:
                log.info("deleted checkpoint %s/%s", self.folder, name)
        except OSError as error:
            log.warning("an old checkpoint in %s cannot be deleted: %s", self.folder, error)
