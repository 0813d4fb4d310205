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
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.manifest import FileRecord
from megalite.checkpoint.place import Tensors
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import Contents
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.tensor_writer import Piece, write_file
from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.optim.part import Part
from megalite.parallel.shard import ParameterSpec, Shard
from megalite.topology import Topology

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=50)
CONFIG = Config(model=MODEL, training=TrainingConfig(global_batch_size=8, train_iters=100))


def parallel(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_backend="gloo")


def config_of(folder: Path, **fields: Any) -> Config:
    return dataclasses.replace(
        CONFIG,
        checkpoint=dataclasses.replace(CONFIG.checkpoint, save=str(folder), load=str(folder), **fields),
    )


def state(topology: Topology, value: float) -> dict[str, torch.Tensor | Part]:
    """A slice of a tensor, a part of its moments, a tensor that all ranks have, and a count."""
    tp, dp = topology.tp, topology.dp
    cut, whole = ParameterSpec((3, 8), Shard("tp", 1)), ParameterSpec((5, 2))
    full = torch.arange(24.0).view(3, 8) * value
    shape = (3, 8 // tp.size)
    mine = full.chunk(tp.size, 1)[tp.rank].flatten()
    start, end = (mine.numel() * (dp.rank + more) // dp.size for more in (0, 1))
    return {
        "model.cut": Part(mine, 0, shape, cut, is_copied=True),
        "model.whole": Part(torch.full((10,), value).bfloat16(), 0, (5, 2), whole, is_copied=True),
        "optimizer.cut.exp_avg": Part(mine[start:end].double(), start, shape, cut, is_copied=False),
        "optimizer.num_steps": torch.tensor(value),
    }


def elements(tensor: torch.Tensor | Part) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, Part) else tensor


def contents_of(config: Config, topology: Topology, iteration: int) -> Contents:
    return Contents.of(Progress(iteration, 8 * iteration), config, topology)


def loaded(topology: Topology, config: Config, saver: Saver | None = None) -> tuple[int, float] | None:
    """The iteration, and the value of the state that every tensor is found to have."""
    tensors = state(topology, 0.0)
    folder = config.checkpoint.load
    assert folder is not None
    intake = load_checkpoint(Path(folder), tensors, config, topology, saver.local if saver else None)
    if intake is None:
        return None
    value = elements(tensors["optimizer.num_steps"]).item()
    assert same(tensors, state(topology, value))
    return intake.progress.iteration, value


def same(tensors: Tensors, others: Tensors) -> bool:
    return all(torch.equal(elements(tensors[name]), elements(others[name])) for name in tensors)


class Gate:
    """Holds up this process's writers until it is opened."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self._opened.set()

    def __call__(self, file: Path, pieces: Mapping[str, Piece]) -> FileRecord:
        self.reached.set()
        assert self._opened.wait(60.0)
        return write_file(file, pieces)


def full_disk(file: Path, pieces: Mapping[str, Piece]) -> FileRecord:
    """Writes half a file."""
    write_file(file, dict(list(pieces.items())[:1]))
    raise OSError(28, "No space left on device")


def defect(file: Path, pieces: Mapping[str, Piece]) -> FileRecord:
    raise ZeroDivisionError("a defect")


@contextmanager
def writer(replacement: Callable[[Path, Mapping[str, Piece]], FileRecord]):
    """Files are written by this, in this process."""
    modules = (save, local_saves)
    for module in modules:
        module.write_file = replacement  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.write_file = write_file  # type: ignore[attr-defined]
