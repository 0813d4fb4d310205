"""Averages of weights with every ZeRO stage and place of the state; an evaluation of them changes no bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import Config
from megalite.train.stopping import Stop, Stopped
from megalite.train.trainer import Trainer, start_trainer
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.test_load_layouts import config_of, full_tensors, pieces_of, world_size
from tests.ranks.train.test_setup_resume import DP2_ZERO1, DP2_ZERO3, PP2, TP2, Layout, main_of

DECAY = 0.8
NUM_ITERATIONS = 3
Tensors = dict[str, torch.Tensor]
DP2: Layout = {"data_parallel_size": 2}
DP2_ZERO2: Layout = {"data_parallel_size": 2, "zero_stage": 2}
GATHERED: Layout = {**DP2_ZERO2, "overlap_param_gather": True}
ROWS = [(DP2_ZERO3, "bf16", "device"), (DP2_ZERO3, "fp32", "file"), (GATHERED, "bf16", "memory")]
SLOW = [
    (layout, dtype, place)
    for layout in ({}, DP2, DP2_ZERO1, GATHERED, DP2_ZERO3, TP2, PP2)
    for dtype in ("fp64", "fp32", "bf16")
    for place in ("device", "memory", "file")
    if (layout, dtype, place) not in ROWS
]


def offload(place: str, folder: Path) -> dict[str, Any]:
    fields = {"memory": {"optimizer_cpu_offload": True}, "file": {"optimizer_nvme_offload": str(folder)}}
    return fields.get(place, {})


def averaging(config: Config, **optimizer: Any) -> Config:
    return replace(
        config,
        optimizer=replace(config.optimizer, **{"ema_decay": DECAY, **optimizer}),
        training=replace(config.training, eval_iters=1),
    )


def used_weights(trainer: Trainer) -> Tensors:
    """This rank's slices of the weights that forward uses, in the model's precision."""
    trainer.optimizer.finish_weights()
    names = [entry.name for buffer in trainer.optimizer.buffers for entry in buffer.bucket.entries]
    return {name: trainer.optimizer.weight(name).to(trainer.optimizer.dtype).clone() for name in names}


def train(topology, config: Config):
    """Evaluates the averages after each iteration, if there are any; returns what each iteration had."""
    with start_trainer(config, topology) as trainer:
        losses, history, in_use, evaluated = [], [], {}, []
        for _ in range(NUM_ITERATIONS):
            losses.append(trainer.step().loss)
            history.append(pieces_of(trainer))
            if trainer.optimizer.averages is not None:
                before = used_weights(trainer)
                with trainer.averaged_weights():
                    evaluated.append(trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"])
                    in_use = used_weights(trainer)
                assert all(weight.equal(before[name]) for name, weight in used_weights(trainer).items())
                trainer.optimizer.check_state()
        return losses, history, in_use, evaluated


@pytest.mark.parametrize(
    ("layout", "dtype", "place"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_the_average_is_the_mean_of_the_weights_and_costs_no_bit(
    layout: Layout, dtype: str, place: str, tmp_path: Path
) -> None:
    config = config_of("gpt-tiny, 2 layers", layout, dtype, tmp_path, tmp_path)
    config = averaging(config, **offload(place, tmp_path))
    ranks = run_ranks(train, config.mesh, world_size(config.parallel), config)
    plain = run_ranks(train, config.mesh, world_size(config.parallel), averaging(config, ema_decay=None))
    assert [rank[0] for rank in ranks] == [rank[0] for rank in plain]
    history = [full_tensors([rank[1][i] for rank in ranks]) for i in range(NUM_ITERATIONS)]
    last = full_tensors([rank[1][-1] for rank in plain])
    assert all(history[-1][name].equal(last[name]) for name in last)  # also the optimizer's state
    shares = DECAY ** torch.arange(NUM_ITERATIONS - 1, -1, -1, dtype=torch.float64)
    shares /= shares.sum()
    averages = {name: each for name, each in history[-1].items() if name.startswith("ema.")}
    assert {name.removeprefix("ema.") for name in averages} == {
        name.removeprefix("model.") for name in last if name.startswith("model.")
    }
    for name, average in averages.items():
        assert average.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
        mains = [main_of(tensors, name.removeprefix("ema.")) for tensors in history]
        expected = sum(share * main.double() for share, main in zip(shares, mains, strict=True))
        assert (average - expected).abs().max() <= (1e-15 if dtype == "fp64" else 1e-6), name
    for rank in ranks:
        for name, weight in rank[2].items():
            full = averages[f"ema.{name}"].to(weight.dtype)
            if weight.shape == full.shape:  # a whole parameter, without padding
                assert weight.equal(full), name
    assert len(set(ranks[0][3])) == NUM_ITERATIONS
    assert ranks[0][3] == ranks[-1][3]


def losses_of_averages(topology, config: Config):
    """The evaluated loss of the averages, and of a model whose weights are set to them."""
    with start_trainer(config, topology) as trainer:
        for _ in range(NUM_ITERATIONS):
            trainer.step()
        with trainer.averaged_weights():
            found = trainer.evaluate(trainer.datasets.valid, 0)["lm_loss"]
            averages = used_weights(trainer)
        with start_trainer(config, topology) as other:
            for chunk in other.chunks:
                for name, parameter in chunk.named_parameters():
                    parameter.data.copy_(averages[name])
            return found, other.evaluate(other.datasets.valid, 0)["lm_loss"]


def test_the_evaluated_loss_is_that_of_the_averages_in_any_layout(tmp_path: Path) -> None:
    one = averaging(config_of("gpt-tiny", {}, "fp64", tmp_path, tmp_path))
    ((loss, expected),) = run_ranks(losses_of_averages, one.mesh, 1, one)
    assert loss == expected
    for layout in (DP2_ZERO3, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}):
        config = averaging(config_of("gpt-tiny", layout, "fp64", tmp_path, tmp_path))
        ranks = run_ranks(train, config.mesh, 2, config)
        assert ranks[0][3][-1] == pytest.approx(loss, rel=1e-12)


def skipping(topology, config: Config):
    """Return whether the averages keep their bits in each iteration after the first; the third is skipped."""
    with start_trainer(config, topology) as trainer:
        averages = []
        for number in range(1, 5):
            allowed = torch.tensor(False) if number == 3 else None
            trainer.train_step.check.allows = lambda *_, allowed=allowed: allowed  # type: ignore[method-assign]
            trainer.step()
            trainer.optimizer.finish_weights()
            assert trainer.optimizer.averages is not None
            shards = trainer.optimizer.averages.shards()
            averages.append({name: shard.tensor.clone() for name, shard in shards.items()})
        return [all(one[name].equal(other[name]) for name in one) for one, other in pairwise(averages)]


@pytest.mark.parametrize("place", ["device", "memory"])
def test_a_skipped_update_leaves_the_averages(place: str, tmp_path: Path) -> None:
    config = config_of("gpt-tiny, 2 layers", DP2_ZERO1, "bf16", tmp_path, tmp_path)
    config = averaging(config, **offload(place, tmp_path))
    assert run_ranks(skipping, config.mesh, 2, config) == [[False, True, False]] * 2


def interrupted(topology, config: Config):
    with start_trainer(config, topology) as trainer:
        trainer.step()
        before = used_weights(trainer)

        def stop() -> None:
            raise Stopped(Stop("an urgent signal"))

        with pytest.raises(Stopped), trainer.averaged_weights():
            trainer.evaluate(trainer.datasets.valid, 0, stop)
        return all(weight.equal(before[name]) for name, weight in used_weights(trainer).items())


def test_an_interrupted_evaluation_restores_the_weights(tmp_path: Path) -> None:
    config = averaging(config_of("gpt-tiny, 2 layers", DP2_ZERO3, "fp32", tmp_path, tmp_path))
    assert run_ranks(interrupted, config.mesh, 2, config) == [True, True]
