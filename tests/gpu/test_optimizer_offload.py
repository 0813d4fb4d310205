"""Optimizer offload on a GPU: the run without, up to the CPU's rounding, and the state leaves its memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.trainer import start_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], hidden_size=256, vocab_size=1000, seq_length=64, params_dtype="bf16"),
    parallel=ParallelConfig(ddp_bucket_size=100_000),  # several buckets
    optimizer=OptimizerConfig(lr=1e-3),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=20, eval_iters=0),
)


def _trained(**changes: Any) -> tuple[list[float], int, int]:
    """Return the losses, the bytes that the run holds on the GPU, and the elements that are offloaded."""
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, **changes))
    before = torch.cuda.memory_allocated()
    with (
        Topology.start(config.parallel.mesh, Launch(0, 1, 0, 1)) as topology,
        start_trainer(config, topology) as trainer,
    ):
        losses = [trainer.step().loss for _ in range(20)]
        trainer.optimizer.finish_weights()
        offload = trainer.optimizer.offload
        count = 0 if offload is None else sum(size.numel for size in offload.storage.sizes)
        return losses, torch.cuda.memory_allocated() - before, count


def test_the_same_run_with_fewer_bytes(tmp_path: Path) -> None:
    _trained()  # the first run in a process also allocates the workspaces of cuBLAS
    losses, held, _ = _trained()
    places: list[dict[str, Any]] = [
        {"optimizer_cpu_offload": True},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"optimizer_nvme_offload": str(tmp_path)},
    ]
    for place in places:
        found, held_less, count = _trained(**place)
        assert found == pytest.approx(losses, rel=2e-3), place
        assert held - held_less == pytest.approx(12 * count, rel=0.02), place
