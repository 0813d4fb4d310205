"""Memory of a process whose optimizer state is in a file, and runs that are killed while they write it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.train.trainer import start_trainer
from tests.programs import run_program
from tests.soak.folder import iterations_of, losses_of, tensors_of

CONFIG = Config(
    model=ModelConfig(
        num_layers=8,
        hidden_size=1024,
        num_attention_heads=16,
        seq_length=32,
        vocab_size=2048,
        params_dtype="bf16",
    ),
    optimizer=OptimizerConfig(lr=1e-4),
    parallel=ParallelConfig(distributed_backend="gloo", keep_freed_memory=False),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=9, eval_iters=0),
)


def _resident(topology, config: Config) -> tuple[int, int]:
    """The process' resident memory after three iterations, and what its plan says is elsewhere."""
    with start_trainer(config, topology) as trainer:
        for _ in range(3):
            trainer.step()
        offload = trainer.optimizer.offload
        planned = 0 if offload is None else offload.bytes.file - offload.bytes.host
        status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024, planned


@pytest.mark.slow
def test_resident_memory_falls_by_the_planned_bytes(tmp_path: Path) -> None:
    in_file = replace(CONFIG, optimizer=replace(CONFIG.optimizer, optimizer_nvme_offload=str(tmp_path)))
    ((before, _),) = run_ranks(_resident, CONFIG.parallel.mesh, 1, CONFIG)
    ((after, planned),) = run_ranks(_resident, CONFIG.parallel.mesh, 1, in_file)
    assert planned > 900e6
    assert before - after == pytest.approx(planned, rel=0.05)  # equal runs differ by about 25 MB


def _flags(save: Path, train_iters: int, *flags: str) -> list[str]:
    model = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --bf16"
    run = "--global-batch-size 2 --micro-batch-size 1 --lr 1e-3 --mock-data --log-interval 1 --eval-iters 0"
    return [
        *(*model.split(), *run.split(), "--train-iters", str(train_iters), "--num-threads", "1"),
        *("--save", str(save), "--load", str(save), "--save-interval", "2", "--keep-last", "2", *flags),
    ]


def _cuts_of_killed_run(folder: Path, train_iters: int, kills: Sequence[tuple[str, int]]) -> list[dict]:
    """Train whole, and again with kills in writes and a resume after each; return what was cut.

    Args:
        kills: of each process, the file in whose write it dies, and the number of that write.
    """
    whole, killed, disk, record = (folder / name for name in ("whole", "killed", "disk", "cut.json"))
    disk.mkdir()
    run = run_program("pretrain_gpt.py", *_flags(whole, train_iters))
    assert run.returncode == 0, run.stderr
    flags = _flags(killed, train_iters, "--optimizer-nvme-offload", str(disk))
    cuts = []
    for kind, number in kills:
        run = run_program("tests/ranks/optim/killed_in_write.py", kind, number, record, *flags)
        assert run.returncode == -signal.SIGKILL, run.stderr
        cut = json.loads(record.read_text())
        record.unlink()
        cuts.append(cut)
        assert 0 < cut["written"] < cut["size"]
        assert cut["file"].startswith(str(disk if kind == "state" else killed))
        assert Path(cut["file"]).exists() == (kind == "checkpoint")  # it is left incomplete
        assert not list(disk.iterdir())
    run = run_program("pretrain_gpt.py", *flags)
    assert run.returncode == 0, run.stderr
    assert losses_of(killed) == losses_of(whole)  # each time an iteration was trained
    assert len(losses_of(whole)) == train_iters
    assert len(iterations_of(killed)) > train_iters  # some were trained again
    assert tensors_of(killed) == tensors_of(whole)
    assert not list(disk.iterdir())
    return cuts


def test_a_run_that_is_killed_in_writes_loses_nothing(tmp_path: Path) -> None:
    state, checkpoint = _cuts_of_killed_run(tmp_path, 6, [("state", 200), ("checkpoint", 2)])
    assert state["times"] == 3  # the update after the first save
    assert "/.iter_0000004." in checkpoint["file"]  # it resumed from the second iteration


@pytest.mark.slow
def test_a_run_that_is_killed_in_many_writes_loses_nothing(tmp_path: Path) -> None:
    in_state = [("state", 1 + 23 * index) for index in range(14)]
    in_checkpoint = [("checkpoint", 1 + index % 4) for index in range(6)]
    cuts = _cuts_of_killed_run(tmp_path, 30, [*in_state[:7], *in_checkpoint, *in_state[7:]])
    of_state = [cut for cut in cuts if not cut["file"].endswith(".safetensors")]
    assert len(of_state) == len(in_state)
    assert {cut["times"] for cut in of_state} == {1, 2, 3, 4}  # updates of the process
    assert len({cut["start"] for cut in of_state}) > 10
