"""A bridge to torch.distributed.checkpoint: its `load` reads our checkpoints into tensors of any placement.

    state = {"model.layers.0.mlp.up.weight": distribute_tensor(empty, mesh, [Shard(0)])}
    torch.distributed.checkpoint.load(state, storage_reader=MegaliteReader("SAVE/iter_0000010"))

torch keeps its own metadata as a pickle; here it is made of index.json, and nothing is unpickled. Importing
this module imports DTensor, which takes a second: training does without.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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

from megalite.checkpoint.boxes import Box, boxes_of
from megalite.checkpoint.full import FullReader
from megalite.checkpoint.manifest import RUN, DamagedCheckpoint, damage_of, read_manifest
from megalite.checkpoint.tensor_reader import open_tensors

Stored = tuple[str, Box]
"""File and box of a chunk."""


class MegaliteReader(StorageReader):
    """Reads one checkpoint's folder, ``SAVE/iter_0000010``; a rank opens and checks what it needs alone.

    Every tensor file that it reads from is first read through and compared with its digest.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.chunks: dict[MetadataIndex, Stored] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another checkpoint's folder, if one is given."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the index tells, in torch's words: each piece is one chunk, or a few where it is no box.

        Raises:
            DamagedCheckpoint: a text file is not as it was saved, or elements of a tensor are in no file.
        """
        self.manifest = read_manifest(self.folder)
        full = FullReader(self.manifest)
        self.chunks = {}
        return Metadata({name: self._tensor_metadata(name, full) for name in full.names()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what the plan asks for, file by file.

        Raises:
            DamagedCheckpoint: a file is missing, has other bytes than were saved or than the index tells.
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
        """Whether it is a folder that may be a checkpoint of megalite."""
        return (Path(checkpoint_id) / RUN).is_file()

    def _tensor_metadata(self, name: str, full: FullReader) -> TensorStorageMetadata:
        shape, chunks = full.shape(name), list[ChunkStorageMetadata]()
        for piece in full.pieces(name):
            whole = Box((0,) * len(shape), shape, 0, shape)
            for box in boxes_of(piece.place) if piece.place else (whole,):
                self.chunks[MetadataIndex(name, box.offsets)] = (piece.file, box)
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
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
