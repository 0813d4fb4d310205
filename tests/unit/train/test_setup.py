"""Test the start-up lines that describe the data of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.data.indexed_dataset import IndexedWriter
from megalite.distributed.topology import Topology
from megalite.optim.offload import OffloadBytes
from megalite.train.setup import announce, describe_offload, describe_replication
from megalite.train.trainer import start_trainer


def test_samples_of_the_run_are_distinguished_from_those_of_the_dataset(
    tmp_path: Path, one_rank: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    """Test batches of 2, 4 and then 4 samples, from a corpus of 40 training and 20 validation samples."""
    prefix = str(tmp_path / "corpus")
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(60):
            writer.add_document([np.arange(8)])
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, vocab_size=16),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(data_path=(prefix,), split="2,1,0"),
        training=TrainingConfig(
            train_samples=11, global_batch_size=4, rampup_batch_size=(2, 2, 2), eval_interval=2, eval_iters=2
        ),
    )
    caplog.set_level(logging.INFO, logger="megalite")
    with start_trainer(config, one_rank) as trainer:
        trainer.epilogues = "GELU of 8 x 8 -> 32: in GEMMs (1.000 ms in GEMMs, 2.000 ms in separate kernels)"
        announce(trainer)
        sizes = dict(trainer.datasets.sizes())
    lines = [record.getMessage() for record in caplog.records]
    assert sizes["train"] > 10
    assert sizes["valid"] > 8
    assert f"train dataset: the run trains on 10 of its {sizes['train']} samples (3 iterations)" in lines
    assert f"valid dataset: each evaluation uses 8 of its {sizes['valid']} samples (--eval-iters 2)" in lines
    (kernels,) = (line for line in lines if line.startswith("kernels on cpu: "))
    assert kernels.endswith(f"; {trainer.epilogues}")
    assert "global batch: 4 samples (data-parallel size 1 x 4 microbatches of 1 sample)" in lines


@pytest.mark.parametrize(
    ("parallel", "device_type", "expected"),
    [
        (ParallelConfig(), "cpu", "gradients are reduced during backward"),
        (
            ParallelConfig(zero_stage=1),
            "cuda",
            "gradients are reduced during backward, weights are gathered during the next forward, "
            "on a stream of high priority",
        ),
        (
            ParallelConfig(zero_stage=2, overlap_grad_reduce=False),
            "cpu",
            "gradients are reduced after backward, weights are gathered before the next forward",
        ),
        (
            ParallelConfig(zero_stage=3),
            "cpu",
            "weights are gathered before they are used, gradients are reduced during backward",
        ),
    ],
)
def test_the_line_of_the_replicas(parallel: ParallelConfig, device_type: str, expected: str) -> None:
    assert describe_replication(Config(parallel=parallel), 2, device_type) == expected


def test_weights_in_8_bits_are_always_gathered_during_the_forward() -> None:
    config = Config(
        parallel=ParallelConfig(zero_stage=1, overlap_param_gather=False),
        training=TrainingConfig(fp8_format="hybrid", fp8_param_gather=True),
    )
    line = describe_replication(config, 2, "cpu")
    assert line.endswith("weights are gathered before the next forward (those in 8 bits during it)")
    assert "8 bits" not in describe_replication(config, 1, "cpu")


def test_replicas_that_share_no_shards_gather_no_weights() -> None:
    assert "gathered" not in describe_replication(Config(parallel=ParallelConfig(zero_stage=2)), 1, "cpu")


def test_the_line_of_offloaded_state() -> None:
    size = OffloadBytes(276_824_064, 80_860_987_392, 0, 0, 0, 0)
    in_file = OptimizerConfig(optimizer_nvme_offload="/disk")
    assert describe_offload(in_file, size, keeps_gradients=False) == (
        "0.277 GB of host memory, 80.861 GB in an unnamed file in /disk; the host updates it"
    )
    in_memory = OptimizerConfig(optimizer_cpu_offload=True)
    assert describe_offload(in_memory, size, keeps_gradients=True) == (
        "0.277 GB of host memory, gradients included; the host updates it"
    )
    assert "there is too little memory to copy gradients under backward" in describe_offload(
        in_memory, size, keeps_gradients=False
    )
