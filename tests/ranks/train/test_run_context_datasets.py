"""Test ranks whose hosts have different files under one path."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megalite.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.data.indexed_dataset import IndexedWriter
from megalite.train.run_context import build_data, resolve_run
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks


def build(topology, config: Config, folder: Path) -> int:
    """Build the datasets in a folder of the rank's own, where the prefix names its own files."""
    os.chdir(folder / str(topology.rank))
    train = build_data(resolve_run(config, topology)).train
    assert train is not None
    return len(train)


@pytest.mark.parametrize("stages", [1, 3])
def test_other_contents_under_one_path_are_refused_on_every_rank(tmp_path: Path, stages: int) -> None:
    """Test that the files of the middle stage do not count: it reads no data."""
    config = Config(
        model=ModelConfig(vocab_size=64, num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=8),
        parallel=ParallelConfig(pipeline_model_parallel_size=stages),
        data=DataConfig(data_path=("corpus",), split="1"),
        training=TrainingConfig(train_iters=2, global_batch_size=6, eval_iters=0),
    )
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        with IndexedWriter(str(tmp_path / str(rank) / "corpus"), np.uint16) as writer:
            for number in range(40):
                writer.add_document([[number] * (9 if rank == 1 and number == 7 else 10)])
    if stages == 3:
        assert len(set(run_ranks(build, config.parallel.mesh, 3, config, tmp_path))) == 1
        return
    with pytest.raises(
        UserError, match=r"^corpus corpus differs between ranks: rank 1 has 40 sequences in 798"
    ):
        run_ranks(build, config.parallel.mesh, 3, config, tmp_path)
