"""A rank that holds several chunks of the model: its parameters, its evaluations and its checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.train.model_chunks import named_parameters
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks


def config_of(schedule, pp=2, folder=None):
    return Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=100, seq_length=16, params_dtype="fp64"),
        parallel=ParallelConfig(pipeline_model_parallel_size=pp, pipeline_schedule=schedule),
        optimizer=OptimizerConfig(lr=1e-2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=4, eval_iters=2),
        checkpoint=CheckpointConfig(save=folder, load=folder),
    )


def trainer_of(topology, config):
    return start_trainer(config, topology)


def describe(topology, config):
    with trainer_of(topology, config) as trainer:
        chunks = [(chunk.is_first, chunk.is_last, list(chunk.layers)) for chunk in trainer.chunks]
        edges = [chunk for chunk in trainer.chunks if chunk.is_first or chunk.is_last]
        tables = {id(chunk.get_parameter("embedding.word.weight")) for chunk in edges}
        names = [name for name, _ in named_parameters(trainer.chunks)]
        return chunks, len(tables), names


@pytest.mark.parametrize(
    ("schedule", "chunks", "num_tables"),
    [
        ("interleaved", [[(True, False, ["0"]), (False, False, ["2"])],
                         [(False, False, ["1"]), (False, True, ["3"])]], [1, 1]),
        ("zb-v", [[(True, False, ["0"]), (False, True, ["3"])],
                  [(False, False, ["1"]), (False, False, ["2"])]], [1, 0]),
    ],
)  # fmt: skip
def test_chunks_of_ranks(schedule, chunks, num_tables):
    config = config_of(schedule)
    told = run_ranks(describe, config.parallel.mesh, 2, config)
    assert [rank[0] for rank in told] == chunks
    assert [rank[1] for rank in told] == num_tables
    for _, _, names in told:
        assert len(names) == len(set(names))
    alone = config_of("1f1b", pp=1)
    ((_, _, all_names),) = run_ranks(describe, alone.parallel.mesh, 1, alone)
    assert set().union(*(names for _, _, names in told)) == set(all_names)


def evaluate(topology, config):
    with trainer_of(topology, config) as trainer:
        return trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_an_evaluation_is_one_ranks(schedule):
    alone, config = config_of("1f1b", pp=1), config_of(schedule)
    (expected,) = run_ranks(evaluate, alone.parallel.mesh, 1, alone)
    told = run_ranks(evaluate, config.parallel.mesh, 2, config)
    assert told == [pytest.approx(expected, rel=1e-12)] * 2


def train(topology, config, num_steps, save):
    with trainer_of(topology, config) as trainer:
        trainer.load()
        losses = [trainer.step().loss for _ in range(num_steps)]
        if save:
            trainer.save()
        return losses


def test_a_checkpoint_of_chunks_resumes(tmp_path):
    (tmp_path / "run").mkdir()
    config = config_of("zb-v", folder=str(tmp_path / "run"))
    elsewhere = config_of("zb-v", folder=str(tmp_path / "none"))
    (whole, _) = run_ranks(train, elsewhere.parallel.mesh, 2, elsewhere, 2, False)
    (first, _) = run_ranks(train, config.parallel.mesh, 2, config, 1, True)
    (second, _) = run_ranks(train, config.parallel.mesh, 2, config, 1, False)
    assert first + second == whole
