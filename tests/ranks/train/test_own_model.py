"""What an own model's first iteration shows: parameters without a gradient, losses that differ over tp."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from megalite import Providers, SequentialStage, Topology, UserError, parse, start_trainer
from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import run_ranks

FLAGS = (
    *("--preset", "gpt-tiny", "--num-layers", "2", "--vocab-size", "64", "--seq-length", "16", "--mock-data"),
    *("--train-iters", "2", "--global-batch-size", "4", "--micro-batch-size", "1", "--eval-iters", "0"),
)
UNUSED = [f"layers.{number}.unused.{name}" for number in range(2) for name in ("bias", "weight")]


class Layer(nn.Module):
    """Use one of two linear layers."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(hidden_size, hidden_size), nn.Linear(2, 2)

    def forward(self, x: Any, microbatch: Any) -> Any:
        return x + self.used(x)


class HalfUsed(SequentialStage):
    """Predict the next token with layers that have unused weights."""

    def build_layer(self, number: int) -> nn.Module:
        return Layer(self.config.hidden_size)


def _two_steps(topology: Topology, *flags: str) -> list[str]:
    """Return what backward did not reach on this rank, in the second of two iterations."""
    config, _ = parse([*FLAGS, *flags])
    with start_trainer(config, topology, providers=Providers(HalfUsed)) as trainer:
        trainer.step()
        trainer.step()
        return sorted(trainer.optimizer.unreached)


@pytest.mark.parametrize("zero_stage", ["0", "2", "3"])
def test_at_every_zero_stage(zero_stage: str) -> None:
    found = run_ranks(_two_steps, ParallelConfig().mesh, 2, "--zero-stage", zero_stage)
    assert found == [UNUSED, UNUSED]


class LocalLoss(HalfUsed):
    """Add the squared sum of the logits, of a rank's columns alone: a mistake with tensor parallelism."""

    def losses(self, output: Any, microbatch: Any) -> Any:
        return super().losses(output, microbatch) + 1e-4 * output.sum() ** 2


def _step(topology: Topology) -> float:
    config, _ = parse([*FLAGS, "--tp", str(topology.tp.size)])
    with start_trainer(config, topology, providers=Providers(LocalLoss)) as trainer:
        return trainer.step().loss


def test_a_loss_of_a_part_of_the_vocabulary_is_refused(one_rank: Topology) -> None:
    assert _step(one_rank) > 0.0
    with pytest.raises(
        UserError, match=r"the loss differs between the ranks of --tp 2, from [\d.]+ to [\d.]+: "
    ):
        run_ranks(_step, ParallelConfig(tensor_model_parallel_size=2).mesh, 2)


def test_with_stored_weight_gradients() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-h1")
    found = run_ranks(_two_steps, parallel.mesh, 2, "--pp", "2", "--pipeline-schedule", "zb-h1")
    assert found == [UNUSED[:2], UNUSED[2:]]
