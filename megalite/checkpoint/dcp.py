"""Let `torch.distributed.checkpoint.load` read our checkpoints in any placement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import RUN, DamagedCheckpoint, damage_of, read_manifest
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.tensor_files import open_tensors
from megalite.tensor_parallel.placement import Box


class StoredBox(NamedTuple):
    """Box of a full tensor, in a box of elements that are consecutive in a piece of the tensor.

    Attributes:
        used: elements in the full tensor, without padding.
        at: number of the first element in the piece.
        shape: size along each dim as stored in the piece, with padding.
    """

    used: Box
    at: int
    shape: tuple[int, ...]


def boxes_of(piece: ParameterRange) -> Iterator[StoredBox]:
    """Yield the boxes of a piece in order of their elements, except padding."""
    for box, at in piece.boxes():
        used = box.common(piece.full)
        if used.numel:
            yield StoredBox(used, at, box.shape)


class MegaliteReader(StorageReader):
    """Reader of one checkpoint, ``SAVE/iter_0000010``. A rank opens only the files that it needs.

    Every tensor file is compared with its digest before it is used.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.chunks: dict[MetadataIndex, tuple[str, StoredBox]] = {}  # file and box

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint's folder, if one is passed."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as torch's metadata. Each piece is one chunk, or a few chunks if it is not a box.

        Raises:
            DamagedCheckpoint: a text file has changed since it was saved, or a tensor has elements in no
                file.
        """
        self.manifest = read_manifest(self.folder)
        full = FullReader(self.manifest)
        self.chunks = {}
        return Metadata({name: self._tensor_metadata(name, full) for name in full.names()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Set up nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the values of the plan, file by file.

        Raises:
            DamagedCheckpoint: a file is missing, has changed since it was saved, or does not match the index.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.chunks[item.storage_index][0], []).append(item)
        if problems := damage_of(self.manifest, sorted(by_file)):
            raise DamagedCheckpoint(self.folder, problems)
        for file, items in by_file.items():
            try:
                self._read_file(file, items, planner)
            except ValueError as error:
                raise DamagedCheckpoint(self.folder, [str(error)]) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a folder that could be a megalite checkpoint."""
        return (Path(checkpoint_id) / RUN).is_file()

    def _tensor_metadata(self, name: str, full: FullReader) -> TensorStorageMetadata:
        shape, chunks = full.shape(name), list[ChunkStorageMetadata]()
        for piece in full.pieces(name):
            whole = StoredBox(Box((0,) * len(shape), shape), 0, shape)
            for box in boxes_of(piece.range) if piece.range else (whole,):
                self.chunks[MetadataIndex(name, box.used.starts)] = (piece.file, box)
                chunks.append(ChunkStorageMetadata(*map(torch.Size, box.used)))
        return TensorStorageMetadata(TensorProperties(full.dtype(name)), torch.Size(shape), chunks)

    @torch.no_grad()
    def _read_file(self, file: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        with open_tensors(self.manifest, file) as handle:
            for item in items:
                _, box = self.chunks[item.storage_index]
                size = torch.Size(box.shape).numel()
                values = handle.get_tensor(item.storage_index.fqn).reshape(-1)
                if values.numel() < box.at + size:
                    raise ValueError(f"{item.storage_index.fqn} has {values.numel()} elements")
                chunk = values[box.at : box.at + size].view(box.shape)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    chunk = chunk.narrow(dim, offset, length)
                target = planner.resolve_tensor(item)
                target.copy_(chunk)
                planner.commit_tensor(item, target)
