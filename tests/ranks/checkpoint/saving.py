"""What tests of saves share: small states, and a writer that can be held up or made to fail."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import local_saves, save
from megalite.checkpoint.folder import name_of
from megalite.checkpoint.lease import hold_folder
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.manifest import FileRecord
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.relayout import load_local
from megalite.checkpoint.save import Contents
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.stored_run import StoredRun
from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.tensor_parallel.placement import Cut

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=50)
CONFIG = Config(model=MODEL, training=TrainingConfig(global_batch_size=8, train_iters=100))


def parallel(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_backend="gloo")


def config_of(folder: Path | str, **fields: Any) -> Config:
    return dataclasses.replace(
        CONFIG,
        checkpoint=dataclasses.replace(CONFIG.checkpoint, save=str(folder), load=str(folder), **fields),
    )


def state(topology: Topology, value: float) -> dict[str, torch.Tensor | ParameterShard]:
    """A slice of a tensor, a part of its moments, a tensor that all ranks have, and a count."""
    tp, dp = topology.tp, topology.dp
    cut, whole = ParameterSpec((3, 8), Cut("tp", 1)), ParameterSpec((5, 2))
    full = torch.arange(24.0).view(3, 8) * value
    shape = (3, 8 // tp.size)
    mine = full.chunk(tp.size, 1)[tp.rank].flatten()
    start, end = (mine.numel() * (dp.rank + more) // dp.size for more in (0, 1))
    return {
        "model.cut": ParameterShard(mine, 0, shape, cut, is_replicated=True),
        "model.whole": ParameterShard(
            torch.full((10,), value).bfloat16(), 0, (5, 2), whole, is_replicated=True
        ),
        "optimizer.cut.exp_avg": ParameterShard(
            mine[start:end].double(), start, shape, cut, is_replicated=False
        ),
        "optimizer.num_steps": torch.tensor(value),
    }


def elements(tensor: torch.Tensor | ParameterShard) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, ParameterShard) else tensor


def contents_of(config: Config, topology: Topology, iteration: int) -> Contents:
    return Contents.of(TrainingProgress(iteration, 8 * iteration), config, topology)


def save_checkpoint(
    folder: Path, progress: TrainingProgress, tensors: Tensors, config: Config, topology: Topology
) -> Path:
    """One checkpoint outside of a run; every rank calls it, and gets the checkpoint's folder."""
    with hold_folder(str(folder), topology) as lease:
        saver = Saver(dataclasses.replace(config.checkpoint, save=str(folder)), topology, lease)
        saver.save(Contents.of(progress, config, topology), tensors, is_last=True)
    return folder / name_of(progress.iteration)


def loaded(topology: Topology, config: Config, saver: Saver | None = None) -> tuple[int, float] | None:
    """The iteration, and the value of the state that every tensor is found to have."""
    tensors = state(topology, 0.0)
    folder = config.checkpoint.load
    assert folder is not None
    source = StoredRun.at(folder, config.checkpoint.save_stage) or Path(folder)
    plan = load_local(saver.local, source, tensors, config) if saver and saver.local else None
    plan = plan or load_checkpoint(source, tensors, config, topology)
    if plan is None:
        return None
    value = elements(tensors["optimizer.num_steps"]).item()
    assert same(tensors, state(topology, value))
    return plan.progress.iteration, value


def same(tensors: Tensors, others: Tensors) -> bool:
    return all(torch.equal(elements(tensors[name]), elements(others[name])) for name in tensors)


class Gate:
    """Holds up this process's writers until it is opened."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self._opened.set()

    def __call__(self, file: Path, pieces: Mapping[str, FilePiece], **options: Any) -> FileRecord:
        self.reached.set()
        assert self._opened.wait(600.0)
        return write_file(file, pieces, **options)


def full_disk(file: Path, pieces: Mapping[str, FilePiece], **_: Any) -> FileRecord:
    """Writes half a file."""
    write_file(file, dict(list(pieces.items())[:1]))
    raise OSError(28, "No space left on device")


def defect(file: Path, pieces: Mapping[str, FilePiece], **_: Any) -> FileRecord:
    raise ZeroDivisionError("a defect")


@contextmanager
def writer(replacement: Callable[..., FileRecord]):
    """Files are written by this, in this process."""
    modules = (save, local_saves)
    for module in modules:
        module.write_file = replacement  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.write_file = write_file  # type: ignore[attr-defined]
