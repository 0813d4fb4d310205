"""A further axis is an entry in the table: ranks that repeat each other train the same run, and are named."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite import SequentialStage
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.config.rules.parallel_rules import sequence
from megalite.data.microbatch import Microbatch
from megalite.distributed.axes import MODEL, coordinates_text
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.observe.verify.record_run import RunRecord, record_rank
from megalite.plan.dry_run.dry_run import DryRun, dry_run_of, report_lines
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterShard
from megalite.train.callbacks.metrics_logging import layer_grad_norms, optimizer_norms
from megalite.train.callbacks.straggler import Stragglers
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.run_context import Providers
from megalite.train.setup import startup_line
from megalite.train.stopping import RequeueNote, Stop, StopConditions, StopSignals
from megalite.train.tracing import PipelineTracing
from megalite.train.train_step import StepResult
from megalite.train.trainer import start_trainer
from megalite.utils.log import log
from tests.live_ranks import run_ranks
from tests.trial_axis import OutermostTrialConfig, TrialConfig, TwoDataAxesConfig

SAME = {"rtol": 1e-11, "atol": 1e-13}
LAYOUTS = {
    "tp2": (TrialConfig, {"tp": 2}, {}),
    "dp2+zero1": (TrialConfig, {"dp": 2}, {"zero_stage": 1}),
    "pp2": (OutermostTrialConfig, {"pp": 2}, {}),
}
SLOW = {
    "tp2dp2+zero1": (TrialConfig, {"tp": 2, "dp": 2}, {"zero_stage": 1}),
    "pp2dp2": (OutermostTrialConfig, {"pp": 2, "dp": 2}, {}),
    "dp2+zero3": (TrialConfig, {"dp": 2}, {"zero_stage": 3}),
    "dp4shard2+zero1": (TrialConfig, {"dp": 4}, {"zero_stage": 1, "data_parallel_shard_degree": 2}),
}
PARAMETERS = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


class Found(NamedTuple):
    """What a rank computed, saved and logged."""

    coordinates: dict[str, int]
    record: RunRecord
    norms: dict[str, float]
    tensors: dict[str, bytes]
    lines: list[str]


def _config(parallel: ParallelConfig, folder: Path) -> Config:
    model = dataclasses.replace(
        PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16, params_dtype="fp64"
    )
    return Config(
        model=model,
        parallel=parallel,
        data=DataConfig(mock_data=True, eod_mask_loss=True),
        training=TrainingConfig(
            micro_batch_size=1 if (parallel.data_parallel_size or 1) > 1 else 2,
            global_batch_size=4,
            train_iters=4,
            eval_iters=0,
        ),
        checkpoint=CheckpointConfig(save=str(folder), load=str(folder)),
        logging=LoggingConfig(trace_pipeline="1:1", tensorboard_dir=str(folder), log_straggler_interval=1),
    )


class _FirstIteration(Callback):
    """Messages along all axes in the first iteration, and the end of the run after it."""

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        for axis in loop.trainer.topology.axes.values():
            all_reduce(torch.ones(1), axis)
        self.grad_norm = result.grad_norm
        loop.request_stop(Stop("one iteration is enough"))


def _run(topology: Topology, config: Config) -> Found:
    """Train, trace and save on this rank; load the save and compare it with what was saved."""
    lines = [startup_line(topology)]
    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    record = record_rank(topology, config, 2)
    with start_trainer(config, topology) as trainer:
        stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
        first = _FirstIteration()  # before the trace, so that its messages are of the iteration
        TrainingLoop(trainer, stop_conditions, [first, PipelineTracing(), Stragglers()]).run()
        optimizer = trainer.optimizer
        norms = {**optimizer_norms(optimizer), "params": optimizer.params_norm()}
        norms |= layer_grad_norms(optimizer, config.model.num_layers, first.grad_norm, topology)
        norms["zeros"] = optimizer.num_zeros()
        trainer.save()
        saved = _bytes(trainer.tensors())
        trainer.step()
        assert _bytes(trainer.tensors()) != saved
        assert trainer.load()
        assert _bytes(trainer.tensors()) == saved
        return Found(topology.coordinates, record, norms, saved, lines)


def _bytes(tensors: dict[str, Any]) -> dict[str, bytes]:
    parts = {
        name: each.tensor if isinstance(each, ParameterShard) else each for name, each in tensors.items()
    }
    return {name: part.numpy().tobytes() for name, part in parts.items()}


@pytest.fixture(scope="module", params=PARAMETERS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run without the trial axis and one with it: each with its config, folder and ranks."""
    kind, sizes, others = (LAYOUTS | SLOW)[request.param]
    fields = {axis.field: sizes.get(axis.name, 1) for axis in MODEL.axes} | others
    found = []
    for parallel in (ParallelConfig(**fields), kind(**fields)):
        folder = tmp_path_factory.mktemp("run")
        config = _config(parallel, folder)
        found.append((config, folder, run_ranks(_run, parallel.mesh, parallel.mesh.smallest_world, config)))
    return found


def test_the_run_is_the_same(runs: Any) -> None:
    (_, _, plain), (_, _, trial) = runs
    assert len(trial) == 2 * len(plain)
    by_place = {tuple(each.coordinates.items()): each for each in plain}
    for each in trial:
        place = {name: rank for name, rank in each.coordinates.items() if name != "trial"}
        expected = by_place[tuple(place.items())]
        torch.testing.assert_close(each.record.losses, expected.record.losses, **SAME)
        torch.testing.assert_close(each.record.grad_norms, expected.record.grad_norms, **SAME)
        assert each.norms == pytest.approx(expected.norms, rel=1e-11)
        assert each.tensors.keys() == expected.tensors.keys()
        if each.coordinates["trial"] == 0:
            for found, wanted in (
                (each.record.gradients, expected.record.gradients),
                (each.record.weights, expected.record.weights),
            ):
                assert found.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    torch.testing.assert_close(found[name], tensor, **SAME)
    assert all(math.isfinite(loss) for each in plain for loss in each.record.losses)
    assert any(each.record.weights for each in trial)


def test_each_file_is_written_once(runs: Any) -> None:
    (_, plain, _), (_, trial, ranks) = runs
    sizes = [
        {file.name: file.stat().st_size for file in folder.glob("iter_*/*.safetensors")}
        for folder in (plain, trial)
    ]
    assert {name.replace("_trial_000", ""): size for name, size in sizes[1].items()} == sizes[0]
    assert all("_trial_000" in name for name in sizes[1])
    layout = json.loads(next(trial.glob("iter_*/run.json")).read_text())["layout"]
    assert layout["trial"] == 2 and math.prod(layout.values()) == len(ranks)
    assert list(layout) == list(ranks[0].coordinates)


def test_the_axis_is_named(runs: Any) -> None:
    _, (_, folder, ranks) = runs
    last = ranks[-1]
    assert "trial-parallel size: 2" in last.lines[0]
    places = [coordinates_text(each.coordinates) for each in ranks]
    assert all(re.search(r"\btrial [01]\b", place) for place in places)
    straggler = next(line for line in last.lines if line.startswith("straggler"))
    assert any(f", {place})" in straggler for place in places)
    (breakdown,) = (line for line in last.lines if line.startswith("pipeline trace of"))
    assert "trial wait" in breakdown
    trace = json.loads((folder / "pipeline_trace_1-1.json").read_text())
    assert trace["otherData"]["layout"]["trial"] == 2
    lanes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert lanes == [f"rank {rank} · {place}" for rank, place in enumerate(places)]
    waits = {event["tid"] for event in trace["traceEvents"] if event.get("cat") == "trial wait"}
    assert waits == set(range(len(ranks)))


def test_the_dry_run_has_the_axis(runs: Any) -> None:
    (plain, _, plain_ranks), (trial, _, ranks) = runs
    expected = dry_run_of(plain, len(plain_ranks), len(plain_ranks) - 1)
    found = dry_run_of(trial, len(ranks), len(ranks) - 1)
    assert _places(found) == {**_places(expected), "trial": 1}
    assert "trial 1 of 2" in next(report_lines(found))
    assert _calls(found) == _calls(expected)
    assert "trial" not in {call.axis for call in found.counts.calls}
    assert found.counts.buffers == expected.counts.buffers


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        ({}, {"zero_stage": 1, "data_parallel_shard_degree": 2}),
        pytest.param({"tp": 2}, {"zero_stage": 1, "data_parallel_shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param({}, {"zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"zero_stage": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_roles_may_be_those_of_two_axes(
    sizes: dict[str, int], others: dict[str, Any], tmp_path: Path
) -> None:
    """Two axes of two ranks that have all roles train the same run as one of four ranks."""
    found = []
    for kind, dp in ((ParallelConfig, 4), (TwoDataAxesConfig, 2)):
        fields = {axis.field: (sizes | {"dp": dp}).get(axis.name, 1) for axis in MODEL.axes} | others
        config = _config(kind(**fields), tmp_path / kind.__name__)
        (tmp_path / kind.__name__).mkdir()
        found.append(run_ranks(_save, config.parallel.mesh, config.parallel.mesh.smallest_world, config))
    (one, one_name), (two, two_name) = (ranks[0] for ranks in found)
    assert (one_name, two_name) == ("dp", "dp_dpx")
    if "tp" in sizes:  # the second axis is inside of tp: the norm adds the ranks' squares in another order
        torch.testing.assert_close(two, one, **SAME)
    else:
        assert one == two
    names = [
        sorted(file.name for file in folder.glob("iter_*/*.safetensors")) for folder in tmp_path.iterdir()
    ]
    assert len(names[0]) == len(names[1]) == len(found[0])


class TokenwiseModel(SequentialStage):
    """A model whose layers do not mix tokens."""

    def build_layer(self, number: int) -> nn.Module:
        return TokenwiseLayer(self.config, self.context, number)


class TokenwiseLayer(nn.Module):
    """Computes x + dropout(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, context: LayerContext, number: int) -> None:
        super().__init__()
        self.norm, self.mlp = build_norm(config, context), MLP(config, context)
        self.dropout = Dropout(0.1, context, f"layers.{number}.output")

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        y, bias, *_ = self.mlp(self.norm(x))
        return self.dropout.add_to(x, y, bias, microbatch.sample_numbers)


@pytest.mark.parametrize(
    ("sizes", "others", "data"),
    [
        ({}, {}, {}),
        (
            {"tp": 2},
            {"sequence_parallel": True},
            {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
        ),
        pytest.param({"pp": 2}, {"zero_stage": 3}, {"eod_mask_loss": True}, marks=pytest.mark.slow),
        ({"dp": 2}, {"zero_stage": 1}, {"reset_position_ids": True}),
    ],
    ids=str,
)
def test_an_axis_may_cut_the_sequence(
    sizes: dict[str, int], others: dict[str, Any], data: dict[str, bool], tmp_path: Path
) -> None:
    """Ranks that hold different tokens of the same samples train the same run as one rank."""
    found = []
    fields = {axis.field: (sizes | {"cp": 2}).get(axis.name, 1) for axis in MODEL.axes} | others
    for parallel in (ParallelConfig(), ParallelConfig(**fields)):
        config = dataclasses.replace(
            _config(parallel, tmp_path),
            data=DataConfig(mock_data=True, **data),
            checkpoint=CheckpointConfig(),
        )
        assert not [*sequence(config, None)]
        mesh = parallel.mesh
        found.append(run_ranks(record_rank, mesh, mesh.smallest_world, config, 2, Providers(TokenwiseModel)))
    (one,), ranks = found
    for each in ranks:
        torch.testing.assert_close(each.losses, one.losses, **SAME)
        torch.testing.assert_close(each.grad_norms, one.grad_norms, **SAME)
        for name, gradient in each.gradients.items():
            torch.testing.assert_close(gradient, one.gradients[name], **SAME)
    assert {name for each in ranks for name in each.gradients} == one.gradients.keys()


def _save(topology: Topology, config: Config) -> tuple[list[float], str]:
    """Return the losses and gradient norms of a run that saves."""
    with start_trainer(config, topology) as trainer:
        results = [trainer.step() for _ in range(3)]
        trainer.save()
    values = [value for result in results for value in (result.loss, result.grad_norm)]
    return values, topology.replicas.name


def _calls(found: DryRun) -> Counter[tuple[object, ...]]:
    """Return the calls without their axis: an axis of all ranks shares the group of the world."""
    return Counter(tuple(call[1:]) for call in found.counts.calls.elements())


def _places(found: DryRun) -> dict[str, int]:
    return {name: place for name, (place, _) in found.axes.items()}
