"""Checkpoints made by hand, without a run."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.formats import ConversionPlan, whole_folder, write_megalite
from megalite.checkpoint.convert.model_settings import parameters_of
from megalite.checkpoint.folder import LATEST, name_of
from megalite.checkpoint.manifest import INDEX, RUN, SUMS, seal
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import Config, DataConfig
from megalite.distributed.topology import Topology
from megalite.model.stage import Stage

FULL = torch.arange(24, dtype=torch.float64).view(4, 6)
"""The tensor `cut`."""
SHORT = torch.arange(5.0)
"""The tensor `padded`."""
STEPS = torch.tensor(3.0)
"""The plain tensor `steps`."""


def cut_pieces() -> list[dict[str, FilePiece]]:
    """Four files of two slices of 2 + 2 columns of padding, each in two stretches that are no boxes."""
    files = []
    room = torch.cat((FULL, torch.full((4, 2), -1.0, dtype=torch.float64)), 1)
    long = torch.cat((SHORT, torch.full((3,), -1.0)))
    for rank in range(2):
        elements = room[:, 4 * rank : 4 * rank + 4].flatten()
        for start, end in ((0, 7), (7, 16)):
            pieces = {
                "cut": FilePiece(
                    elements[start:end], ParameterRange((4, 6), (0, 4 * rank), (4, 4), start, end)
                ),
                "steps": FilePiece(STEPS),
            }
            if start == 0:
                pieces["padded"] = FilePiece(
                    long[4 * rank : 4 * rank + 4], ParameterRange((5,), (4 * rank,), (4,), 0, 4)
                )
            files.append(pieces)
    return files


@dataclass
class MemorySource:
    """A model whose weights are in memory, as the source of a conversion."""

    config: Config
    weights: Mapping[str, Tensor]
    progress: TrainingProgress
    hugging_face: Mapping[str, Any] | None = None

    @staticmethod
    def of(
        stage: Stage, data: DataConfig | None = None, progress: TrainingProgress | None = None
    ) -> MemorySource:
        """Takes a stage of the whole model, without the vocabulary's padding."""
        specs = parameters_of(stage.config)
        weights = {name: stage.get_parameter(name).data[: spec.used_shape[0]] for name, spec in specs.items()}
        config = Config(model=stage.config, data=data or DataConfig())
        return MemorySource(config, weights, progress or TrainingProgress())

    def dtype_of(self, name: str) -> torch.dtype:
        return self.weights[name].dtype

    def tensor(self, name: str) -> Tensor:
        return self.weights[name]

    def save(self, folder: Path) -> Path:
        """Writes our folder with one checkpoint of the weights."""
        with whole_folder(folder, 0) as aside:
            write_megalite(aside, ConversionPlan(self, folder))
        return folder


def write_checkpoint(
    save: Path,
    iteration: int = 10,
    files: Sequence[Mapping[str, FilePiece]] | None = None,
    description: Mapping[str, Any] | None = None,
) -> Path:
    """Writes and seals a checkpoint, and makes it the latest."""
    folder = save / name_of(iteration)
    folder.mkdir(parents=True)
    records = [
        write_file(folder / f"part_{number}.safetensors", pieces)
        for number, pieces in enumerate(cut_pieces() if files is None else files)
    ]
    told = {"progress": {"iteration": iteration, "consumed_samples": 0}, "model": {}, "run": {}}
    seal(folder, told | dict(description or {}), "model: {}\n", records)
    (save / LATEST).write_text(f"{name_of(iteration)}\n")
    return folder


def write_dcp(topology: Topology, tensors: Mapping[str, Tensor], folder: Path, as_shards: bool) -> bool:
    """Save the tensors with DCP, cut by rows or columns over the ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (topology.world_size,))
    state = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        cuts = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
        state[name] = distribute_tensor(tensor, mesh, [cuts[number % len(cuts)]])
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True) if as_shards else None
    dcp.save(state, storage_writer=writer, checkpoint_id=None if writer else folder)
    return True


def make_pipe(file: Path) -> None:
    """Put a pipe in the place of a file; who waits for its other end gets an empty file, and no hang."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    threading.Thread(target=lambda: os.close(os.open(file, os.O_WRONLY)), daemon=True).start()


def reseal(folder: Path, *names: str) -> None:
    """Makes SHA256SUMS fit what the files hold now: what a hostile writer would do."""
    lines = dict(line.split("  ")[::-1] for line in (folder / SUMS).read_text().splitlines())
    for name in names:
        lines[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in lines.items()))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file, and SHA256SUMS with it."""
    content = json.loads((folder / name).read_text())
    changed = change(content)
    (folder / name).write_text(json.dumps(content if changed is None else changed))
    reseal(folder, name)


def edit_run(folder: Path, **parts: Any) -> None:
    """Changes parts of run.json, and SHA256SUMS with it."""
    edit(folder, RUN, lambda run: run | parts)


def edit_piece(folder: Path, tensor: str, **fields: Any) -> None:
    """Changes what the index tells of a tensor's first piece, and SHA256SUMS with it."""
    edit(folder, INDEX, lambda index: index["tensors"][tensor][0].update(fields))
