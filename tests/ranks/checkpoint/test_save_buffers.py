"""Buffers that training changes: saved once, loaded in any layout, and the same in every layout."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite import ColumnParallelLinear, Cut, Providers, RowParallelLinear, SequentialStage, new_buffer
from megalite.checkpoint.full_tensors import FullReader, check_weights
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.saver import HostCopy
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import compare
from megalite.plan.dry_run.dry_run import dry_run_of
from megalite.tensor_parallel.parameter_spec import gather_full, spec_of
from megalite.train.model_chunks import named_parameters, saved_buffers
from megalite.train.module_costs import module_costs
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.errors import UserError
from megalite.utils.log import log
from tests.live_ranks import record_run, run_ranks

Layout = dict[str, Any]
TP2: Layout = {"tensor_model_parallel_size": 2}
PP2: Layout = {"pipeline_model_parallel_size": 2}
DP2: Layout = {"data_parallel_size": 2}
SAME = {"rtol": 1e-11, "atol": 1e-13}
NAMES = [f"layers.{number}.{name}" for number in range(2) for name in ("energy", "num_updates", "shift")]


class Scaled(nn.Module):
    """Divides hidden channels by the running mean of their energy, which training updates."""

    def __init__(self, stage: SequentialStage) -> None:
        super().__init__()
        h, ffn, context = stage.config.hidden_size, stage.config.ffn_size, stage.context
        self.up = ColumnParallelLinear(h, ffn, context, std=0.1)
        self.down = RowParallelLinear(ffn, h, context, std=0.1)
        energy = torch.linspace(1.0, 2.0, ffn, dtype=torch.float64)
        self.register_buffer("energy", new_buffer(energy, context, Cut("tp", 0)))
        self.register_buffer("shift", torch.zeros(h, dtype=torch.float64))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros_like(self.energy), persistent=False)

    def forward(self, x: Tensor, microbatch: Any) -> Tensor:
        y = self.up(x)  # [s, b, ffn/tp]
        self.seen += y.detach().square().sum((0, 1))
        return x + self.down(torch.tanh(y / self.energy)) + self.shift

    def update(self, topology: Topology) -> None:
        """Once per iteration, with sums over all samples; `energy` is replaced by a new tensor."""
        total = all_reduce(self.seen.clone(), topology.loss_ranks)
        self.seen.zero_()
        self.energy = self.energy.lerp(total, 0.01)
        self.shift += 1e-5 * all_reduce(total.sum(), topology.tp)
        self.num_updates += 1


class ScaledModel(SequentialStage):
    def build_layer(self, number: int) -> nn.Module:
        return Scaled(self)


def config_of(layout: Layout, save: Path | None = None, load: Path | None = None, **options: Any) -> Config:
    return Config(
        model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16, params_dtype="fp64"),
        parallel=ParallelConfig(**layout),
        optimizer=OptimizerConfig(lr=1e-2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=8, eval_iters=0),
        checkpoint=CheckpointConfig(
            save=None if save is None else str(save), load=None if load is None else str(load), **options
        ),
    )


def num_ranks(config: Config) -> int:
    parallel = config.parallel
    return parallel.tp * parallel.pipeline_model_parallel_size * (parallel.data_parallel_size or 1)


@contextmanager
def training(
    topology: Topology, config: Config, model: type[SequentialStage] = ScaledModel
) -> Iterator[Trainer]:
    with start_trainer(config, topology, providers=Providers(model)) as trainer:
        yield trainer


def step(trainer: Trainer) -> float:
    loss = trainer.step().loss
    for chunk in trainer.chunks:
        for layer in chunk.layers.values():
            layer.update(trainer.topology)
    return loss


def full_model(trainer: Trainer) -> dict[str, Tensor]:
    """All full weights and buffers of this rank's stage."""
    topology = trainer.topology
    trainer.optimizer.finish_weights()
    weights = {
        name: gather_full(trainer.optimizer.weight(name), spec_of(parameter), topology)
        for name, parameter in named_parameters(trainer.chunks)
        if not spec_of(parameter).num_padding
    }
    buffers = {
        name: gather_full(buffer.tensor.view(buffer.shape), buffer.spec, topology)
        for name, buffer in saved_buffers(trainer.chunks, topology).items()
    }
    return weights | buffers


Result = tuple[list[float], dict[str, Tensor]]


def run(topology: Topology, config: Config, num_before: int, num_after: int) -> Result:
    """Train and save if there is a folder to save to; load before, if there is one to load from."""
    with training(topology, config) as trainer:
        if config.checkpoint.load is not None:
            assert trainer.load() is not None
        losses = [step(trainer) for _ in range(num_before)]
        if config.checkpoint.save is not None:
            trainer.save()
        losses += [step(trainer) for _ in range(num_after)]
        trainer.saver.finish()
        return losses, full_model(trainer)


@pytest.fixture(scope="module")
def reference() -> Result:
    """Three iterations on one rank."""
    return run_ranks(run, ParallelConfig().mesh, 1, config_of({}), 0, 3)[0]


CASES = [
    pytest.param({}, {**TP2, **DP2, "zero_stage": 3}, id="one rank to tp2 dp2 zero3"),
    pytest.param(
        {**TP2, **DP2, "zero_stage": 3}, {**PP2, **DP2, "zero_stage": 1}, id="tp2 zero3 to pp2 zero1"
    ),
    pytest.param({**TP2, **PP2}, {"tensor_model_parallel_size": 4}, id="tp2 pp2 to tp4"),
]


@pytest.mark.parametrize(("saved", "loaded"), CASES)
def test_a_run_continues_in_another_layout(
    saved: Layout, loaded: Layout, reference: Result, tmp_path: Path
) -> None:
    config = config_of(saved, save=tmp_path)
    run_ranks(run, config.parallel.mesh, num_ranks(config), config, 2, 0)
    manifest = read_manifest(tmp_path / "iter_0000002")
    for name in NAMES:  # each element is in one file
        pieces = manifest.tensors[f"model.{name}"]
        assert sum(each.range.num_used for each in pieces) == reference[1][name].numel()
    assert not any("seen" in name for name in manifest.tensors)
    config = config_of(loaded, load=tmp_path)
    found: dict[str, Tensor] = {}
    for losses, model in run_ranks(run, config.parallel.mesh, num_ranks(config), config, 0, 1):
        assert losses == pytest.approx(reference[0][2:], rel=1e-11)
        found |= model
    assert found["layers.1.num_updates"] == 3
    assert reference[1]["layers.0.energy"][0] != 1.0
    for name, full in found.items():
        torch.testing.assert_close(full, reference[1][name], **SAME)
    assert set(NAMES) <= found.keys()


def test_a_run_resumes_bitwise(tmp_path: Path, one_rank: Topology) -> None:
    losses, model = run(one_rank, config_of({}, save=tmp_path), 2, 1)
    resumed = run(one_rank, config_of({}, load=tmp_path), 0, 1)
    assert resumed[0] == losses[2:]
    for name, full in resumed[1].items():
        torch.testing.assert_close(full, model[name], rtol=0, atol=0)


def test_torchs_checkpoint_library_reads_buffers(tmp_path: Path, one_rank: Topology) -> None:
    import torch.distributed.checkpoint as dcp

    from megalite.checkpoint.dcp import MegaliteReader

    _, model = run(one_rank, config_of({}, save=tmp_path), 1, 0)
    state = {f"model.{name}": torch.zeros_like(model[name]) for name in NAMES}
    dcp.load(state, storage_reader=MegaliteReader(tmp_path / "iter_0000001"), no_dist=True)
    assert all(torch.equal(state[f"model.{name}"], model[name]) for name in NAMES)


def test_tools_that_build_the_model_from_its_config_name_the_buffers(
    tmp_path: Path, one_rank: Topology
) -> None:
    _, model = run(one_rank, config_of({}, save=tmp_path), 0, 0)
    manifest = read_manifest(tmp_path / "iter_0000000")
    check_weights(manifest, {*model, "embedding.word.weight", "head.output.weight"}, 2)
    weights = {*model, "embedding.word.weight", "head.output.weight"} - {*NAMES}
    with pytest.raises(UserError, match=r"has no layers.0.energy, .* and 3 more; only the program"):
        check_weights(manifest, weights, 2)


class Tracked(SequentialStage):
    """Sums the squares of its layers' inputs over all samples in a buffer."""

    is_summed = True

    def build_layer(self, number: int) -> nn.Module:
        return TrackedLayer(self, self.is_summed)


class TrackedLayer(nn.Module):
    def __init__(self, stage: SequentialStage, is_summed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(stage.config.hidden_size, stage.config.hidden_size).double()
        self.register_buffer("seen", torch.zeros(stage.config.hidden_size, dtype=torch.float64))
        self.axis = stage.context.topology.loss_ranks if is_summed else None

    def forward(self, x: Tensor, microbatch: Any) -> Tensor:
        seen = x.detach().square().sum((0, 1))
        self.seen += seen if self.axis is None else all_reduce(seen, self.axis)
        return x + torch.tanh(self.linear(x))


class TrackedLocally(Tracked):
    """The mistake: each replica has the sum of its own samples."""

    is_summed = False


def test_layouts_are_compared_by_buffers_too() -> None:
    """A layout that changes a buffer is not the same run, even if no loss shows it."""
    reference = record_run(config_of({}), 2, 1, Providers(Tracked))
    assert reference.weights["layers.1.seen"].sum() > 0
    config = config_of({**TP2, **PP2})
    same = compare(record_run(config, 2, 4, Providers(Tracked)), reference)
    assert 0.0 <= same.weights["layers.1.seen"] < 1e-11
    reference.weights["layers.1.seen"][3] *= 2
    changed = compare(record_run(config_of({}), 2, 1, Providers(Tracked)), reference)
    assert changed.weights["layers.1.seen"] > 0.01


def test_a_save_in_the_background_has_the_buffers_of_its_iteration(
    tmp_path: Path, one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies the weights while the next forward changes the buffers."""
    changed, fill = threading.Event(), HostCopy.fill
    monkeypatch.setattr(HostCopy, "fill", lambda copy: changed.wait(600.0) and fill(copy))
    with training(one_rank, config_of({}, save=tmp_path, async_save=True), Tracked) as trainer:
        trainer.step()
        layer = trainer.chunks[0].layers["1"]
        seen = layer.seen.clone()
        trainer.save()
        layer.register_forward_hook(lambda *_: changed.set())
        trainer.step()
        trainer.saver.finish()
    saved = FullReader(read_manifest(tmp_path / "iter_0000001")).tensor("model.layers.1.seen")
    assert torch.equal(saved, seen) and not torch.equal(saved, layer.seen)


def one_step(topology: Topology, config: Config, model: type[SequentialStage]) -> None:
    with training(topology, config, model) as trainer:
        trainer.step()


def test_replicas_with_different_values_are_an_error() -> None:
    config = config_of(DP2)
    run_ranks(one_step, config.parallel.mesh, 2, config, Tracked)
    with pytest.raises(UserError, match=r"the buffer layers.0.seen, layers.1.seen differ between ranks"):
        run_ranks(one_step, config.parallel.mesh, 2, config, TrackedLocally)


def test_measuring_a_run_does_not_change_its_buffers(one_rank: Topology) -> None:
    with training(one_rank, config_of({}), Tracked) as trainer:
        trainer.step()
        before = {name: each.tensor.clone() for name, each in saved_buffers(trainer.chunks, one_rank).items()}
        module_costs(trainer)
        for name, each in saved_buffers(trainer.chunks, one_rank).items():
            assert torch.equal(each.tensor, before[name]) and before[name].sum() > 0


def test_the_dry_run_counts_their_bytes() -> None:
    ffn, h = 4 * 64, 64
    one, two = (dry_run_of(config_of(each), size, 0, ScaledModel) for each, size in (({}, 1), (TP2, 2)))
    assert one.counts.buffers.module_buffers == 2 * 8 * (2 * ffn + h + 1)
    assert two.counts.buffers.module_buffers == 2 * 8 * (ffn + h + 1)


class Plain(SequentialStage):
    """The model without its buffers."""

    def build_layer(self, number: int) -> nn.Module:
        layer = Scaled(self)
        for name in ("energy", "shift", "num_updates"):
            layer.register_buffer(name, getattr(layer, name), persistent=False)
        return layer


def test_buffers_that_a_checkpoint_lacks(
    tmp_path: Path, one_rank: Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run would not be the same run; a new one begins with the initial values."""
    with training(one_rank, config_of({}, save=tmp_path), Plain) as trainer:
        step(trainer)
        trainer.save()
    assert not any("energy" in name for name in read_manifest(tmp_path / "iter_0000001").tensors)
    with (
        training(one_rank, config_of({}, load=tmp_path)) as trainer,
        pytest.raises(UserError, match=r"iter_0000001 lacks model.layers.0.energy, .* which this model has"),
    ):
        trainer.load()
    monkeypatch.setattr(log, "propagate", True)
    for options, first_format in (({"finetune": True}, 5), ({}, 6)):  # or one of an earlier format
        monkeypatch.setattr("megalite.checkpoint.load.FIRST_WITH_BUFFERS", first_format)
        with training(one_rank, config_of({}, load=tmp_path, **options)) as trainer:
            with caplog.at_level(logging.WARNING):
                assert trainer.load() is not None
            assert "start at their initial values: checkpoint" in caplog.text
            caplog.clear()
            initial = torch.linspace(1.0, 2.0, 256, dtype=torch.float64)
            assert torch.equal(trainer.chunks[0].layers["0"].energy, initial)
            assert trainer.progress.iteration == (0 if options else 1)
