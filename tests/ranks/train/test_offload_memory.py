"""Memory of a process whose optimizer state is in a file, and runs that are killed while they write it."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.train.trainer import start_trainer

ROOT = Path(__file__).parents[3]
NUM_KILLS = 20
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
    ((before, _),) = run_ranks(_resident, CONFIG.parallel, 1, CONFIG)
    ((after, planned),) = run_ranks(_resident, CONFIG.parallel, 1, in_file)
    assert planned > 900e6
    assert before - after == pytest.approx(planned, rel=0.02)


def _command(save: Path, *flags: str) -> list[str]:
    model = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --bf16"
    run = (
        "--train-iters 150 --global-batch-size 2 --micro-batch-size 1 --lr 1e-3 --mock-data --log-interval 1"
    )
    return [
        *(sys.executable, "pretrain_gpt.py", *model.split(), *run.split(), "--eval-iters", "0"),
        *("--save", str(save), "--load", str(save), "--save-interval", "2", "--keep-last", "2", *flags),
    ]


def _losses(save: Path) -> list[tuple[int, float]]:
    lines = (save / "metrics.jsonl").read_text().splitlines()
    objects = [json.loads(line) for line in lines if line.endswith("}")]
    return [(each["iteration"], each["lm_loss"]) for each in objects if "lm_loss" in each]


@pytest.mark.slow
def test_a_run_that_is_killed_many_times_loses_nothing(tmp_path: Path) -> None:
    whole, killed, disk = tmp_path / "whole", tmp_path / "killed", tmp_path / "disk"
    disk.mkdir()
    subprocess.run(_command(whole), cwd=ROOT, check=True, capture_output=True)
    expected = dict(_losses(whole))
    command = _command(killed, "--optimizer-nvme-offload", str(disk))
    chance = random.Random(1)
    for number in range(NUM_KILLS):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
            for line in run.stdout:  # until it trains, and then some of its iterations
                if b"iteration" in line and b"loss" in line:
                    break
            time.sleep(chance.uniform(0.0, 0.1 * (number % 3)))
            run.send_signal(signal.SIGKILL)
        assert run.returncode == -signal.SIGKILL  # it had not ended
        assert not list(disk.iterdir())
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = _losses(killed)
    assert dict(found).keys() == expected.keys()
    assert all(loss == expected[iteration] for iteration, loss in found)
    assert len(found) > len(expected)  # some iterations were trained again
