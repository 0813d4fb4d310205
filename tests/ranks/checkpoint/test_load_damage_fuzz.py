"""Random damage to any file of a checkpoint: never loaded wrong, never a traceback."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import CheckpointConfig, Config, ModelConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import save_checkpoint

CONFIG = Config(
    model=ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=50),
    training=TrainingConfig(global_batch_size=8, train_iters=90),
)
OLD, NEW = 10, 20
Tensors = dict[str, torch.Tensor | ParameterShard]


def tensors(topology: Topology, seed: int | None) -> Tensors:
    """Values of an iteration; zeros without one. Ranks share the state out."""

    def values(name: str, numel: int) -> torch.Tensor:
        if seed is None:
            return torch.zeros(numel)
        return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + len(name)))

    found: Tensors = {"optimizer.num_steps": values("steps", 1)[0]}
    share = 12 // topology.dp.size
    for name in ("model.up.weight", "model.norm"):
        found[name] = ParameterShard(values(name, 12), 0, (3, 4), ParameterSpec((3, 4)), is_replicated=True)
        state, start = f"optimizer.{name}.exp_avg", share * topology.dp.rank
        mine = values(state, 12)[start : start + share]
        found[state] = ParameterShard(mine, start, (3, 4), ParameterSpec((3, 4)), is_replicated=False)
    return found


def elements(tensor: torch.Tensor | ParameterShard) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, ParameterShard) else tensor


def truncate(rng: random.Random, file: Path, _: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def flip_bit(rng: random.Random, file: Path, _: Path) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def delete(_: random.Random, file: Path, __: Path) -> None:
    file.unlink()


def swap(rng: random.Random, file: Path, older: Path) -> str:
    """With another file of the checkpoint; or it is the same file of the one before, which stays whole."""
    others = [*file.parent.iterdir()] if file.name != "latest" else []
    other = rng.choice([*others, older / file.name if older.joinpath(file.name).exists() else file])
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    if other.parent == file.parent:
        other.write_bytes(content)
    return other.name


WAYS: tuple[Callable[[random.Random, Path, Path], str | None], ...] = (truncate, flip_bit, delete, swap)


WITHOUT_DIGEST = ("latest", "SHA256SUMS")
"""Files that no digest covers; of all others each byte is checked."""


class LogLines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def damage_and_load(topology: Topology, folder: Path, seeds: range) -> list[tuple[int, str, str, bool]]:
    """For each seed its way, the file's name, and whether the checkpoint before was loaded instead."""
    found = []
    for iteration in (OLD, NEW):
        save_checkpoint(
            folder, TrainingProgress(iteration, 80), tensors(topology, iteration), CONFIG, topology
        )
    log_lines = LogLines()
    logging.getLogger("megalite").addHandler(log_lines)
    config = replace(CONFIG, checkpoint=CheckpointConfig())
    for seed in seeds:
        rng, copy = random.Random(seed), folder.with_name(f"copy{seed}")
        way = WAYS[seed % len(WAYS)]
        with topology.agreed():
            if topology.rank == 0:
                shutil.copytree(folder, copy)
        files = sorted([*(folder / f"iter_{NEW:07d}").iterdir(), folder / "latest"])
        file = copy / rng.choice(files).relative_to(folder)
        with topology.agreed():
            if topology.rank == 0:
                before = file.read_bytes()
                names = {file.name, way(rng, file, copy / f"iter_{OLD:07d}") or file.name}
        log_lines.lines.clear()
        mine = tensors(topology, None)
        try:
            plan = load_checkpoint(copy, mine, config, topology)
        except UserError as error:  # a damaged `latest` alone may name what is not there
            raise AssertionError(f"seed {seed}: {error}") from error
        assert plan is not None
        iteration = plan.progress.iteration
        assert iteration in (OLD, NEW), seed
        for name, expected in tensors(topology, iteration).items():
            assert torch.equal(elements(mine[name]), elements(expected)), (seed, name)
        if topology.rank == 0:
            after = file.read_bytes() if file.exists() else None
            if after is not None and file.name in WITHOUT_DIGEST:  # white space at the end changes nothing
                before, after = before.strip(), after.strip()
            is_changed = after != before
            assert (iteration == OLD) == (is_changed and file.name != "latest"), (seed, file.name)
            if is_changed:
                assert any(name in line for name in names for line in log_lines.lines), (
                    seed,
                    log_lines.lines,
                )
        found.append((seed, way.__name__, file.name, iteration == OLD))
        with topology.agreed():
            if topology.rank == 0:
                shutil.rmtree(copy)
    return found


def check(found: list[tuple[int, str, str, bool]]) -> None:
    """Most damage is not harmless."""
    assert sum(is_reported for *_, is_reported in found) > len(found) // 2


def test_damage_is_harmless_or_reported(tmp_path: Path, topology) -> None:
    check(damage_and_load(topology, tmp_path / "save", range(20)))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_much_damage_is_harmless_or_reported(tmp_path: Path, world_size: int) -> None:
    """Ranks share the check of the files."""
    parallel = replace(CONFIG.parallel, data_parallel_size=world_size)
    seeds = range(1000 * world_size, 1000 * world_size + 200)
    found = run_ranks(damage_and_load, parallel.mesh, world_size, tmp_path / "save", seeds)[0]
    assert len(found) == 200
    assert len({file for _, _, file, _ in found}) == 5 + world_size
    check(found)
