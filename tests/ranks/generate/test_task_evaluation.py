"""Scores of tasks on training ranks equal those of a saved checkpoint, in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.distributed.topology import Topology
from megalite.generate.benchmark_tasks import HarnessModel
from megalite.generate.task_evaluation import TrainingModel
from megalite.generate.trained_model import ModelFlags, open_trained
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.test_load_layouts import Layout

WORDS = ("In the beginning", "God", "created the heaven and the earth", "x" * 90)
WINDOWS = [(list(one.encode()), list(other.encode())) for one in WORDS for other in WORDS[:3]][:-1]
"""11 windows of 6 to 106 tokens; the model reads 64. The last batches are incomplete and uneven."""


def config_of(layout: Layout, **training: Any) -> Config:
    model = replace(PRESETS["llama-tiny"], vocab_size=257, params_dtype="fp64", init_method_std=0.3)
    experts = {"num_experts": 4, "moe_layer_freq": (1, 0, 0, 0), "moe_ffn_hidden_size": 24}
    return Config(
        model=replace(model, seq_length=64, **experts),  # a router's terms of the loss, on the first stage
        parallel=ParallelConfig(**layout),
        data=DataConfig(mock_data=True, reset_attention_mask=True),
        training=TrainingConfig(
            **{"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 4, "eval_iters": 0, **training}
        ),
    )


def scores(topology: Topology, config: Config) -> tuple[list[tuple[float, bool]], float, int]:
    """The scores, the loss of the iteration that follows, and how often the pipeline has run."""
    num_runs = 0

    def count() -> None:
        nonlocal num_runs
        num_runs += 1

    with start_trainer(config, topology) as trainer:
        trainer.step()
        if config.checkpoint.save:
            trainer.save(is_last=True)
        found = TrainingModel(trainer, ByteTokenizer(), count).scores(WINDOWS)
        return found, trainer.step().loss, num_runs


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[float, bool]], float]:
    """The scores of the checkpoint of one rank, and the loss of a run without tasks."""
    folder = tmp_path_factory.mktemp("run")
    config = replace(config_of({}), checkpoint=CheckpointConfig(save=str(folder)))
    ((_, loss, _),) = run_ranks(scores, config.mesh, 1, config)
    return run_ranks(harness_scores, config.mesh, 1, folder)[0], loss


def harness_scores(topology: Topology, folder: Path) -> list[tuple[float, bool]]:
    trained = open_trained(ModelFlags(folder, None, None, ParallelConfig(), None), topology)
    return HarnessModel(trained, ByteTokenizer(), 3, topology).scores(WINDOWS)


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
        {"data_parallel_size": 2, "zero_stage": 3},
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        {"context_parallel_size": 2, "cp_comm_type": "p2p", "dynamic_context_parallel": True},
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                {},
                {"tensor_model_parallel_size": 2, "sequence_parallel": True},
                {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"},
                {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
                {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "context_parallel_size": 2},
                {
                    "tensor_model_parallel_size": 2,
                    "sequence_parallel": True,
                    "pipeline_model_parallel_size": 2,
                    "data_parallel_size": 2,
                    "zero_stage": 1,
                },
            )
        ),
    ],
    ids=str,
)
def test_training_ranks_score_as_a_checkpoint_does(
    layout: Layout, expected: tuple[list[tuple[float, bool]], float]
) -> None:
    config = config_of(layout)
    wanted, loss = expected
    for found, next_loss, num_runs in run_ranks(scores, config.mesh, config.mesh.smallest_world, config):
        assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], rel=1e-10)
        assert [is_best for _, is_best in found] == [is_best for _, is_best in wanted]
        assert next_loss == pytest.approx(loss, rel=1e-12)
        assert num_runs == 2  # of 8 samples of the global batch


@pytest.mark.slow
def test_a_checkpoint_of_slices_is_scored_without_them(
    tmp_path: Path, expected: tuple[list[tuple[float, bool]], float]
) -> None:
    config = config_of({"context_parallel_size": 2, "cp_comm_type": "p2p"})
    config = replace(config, checkpoint=CheckpointConfig(save=str(tmp_path)))
    run_ranks(scores, config.mesh, 2, config)
    (found,) = run_ranks(harness_scores, ParallelConfig().mesh, 1, tmp_path)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected[0]], rel=1e-10)
