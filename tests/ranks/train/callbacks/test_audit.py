"""Audits change nothing, and find flipped bits, name the rank and keep the last good checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.checkpoint.folder import iterations_in, read_latest
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megalite.config.model import ParamsDtype
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.train.audit.finding import AuditFailed, Finding
from megalite.train.audit.replicas import held_tensors
from megalite.train.callbacks import default_callbacks
from megalite.train.callbacks.audit import Audit, check_determinism
from megalite.train.callbacks.checkpointing import Checkpointing
from megalite.train.callbacks.module_profile import ModuleProfile
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import start_trainer
from tests.power.bit_flips import BitFlip, Injection, flip
from tests.trial_axis import TrialConfig, TwoDataAxesConfig

DP2 = ParallelConfig(data_parallel_size=2)
DP3 = ParallelConfig(data_parallel_size=3)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, ParallelConfig()),
    "tp2 sp": (2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2 dp2": (4, replace(PP2, data_parallel_size=2)),
    "pp2 zero bubble": (2, replace(PP2, pipeline_schedule="zb-v")),
    "dp2 zero1": (2, replace(DP2, zero_stage=1)),
    "dp2 zero2": (2, replace(DP2, zero_stage=2)),
    "dp2 zero3": (2, replace(DP2, zero_stage=3)),
    "dp4 shard2 zero3": (
        4,
        ParallelConfig(data_parallel_size=4, zero_stage=3, data_parallel_shard_degree=2),
    ),
    "a trial axis": (2, TrialConfig()),
    "two data axes": (4, TwoDataAxesConfig(data_parallel_size=2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "offload": {"optimizer": OptimizerConfig(optimizer_cpu_offload=True)},
    "recompute": {"recompute": RecomputeConfig(recompute_granularity="full")},
    "offloaded activations": {"recompute": RecomputeConfig(cpu_offload_activations=2)},
    "masked loss": {"data": DataConfig(mock_data=True, eod_mask_loss=True, reset_position_ids=True)},
}


def _config(parallel: ParallelConfig, folder: Path | None = None, **training: Any) -> Config:
    given = {"global_batch_size": 8, "train_iters": 4, "eval_iters": 0, "audit_interval": 2, **training}
    return Config(
        model=replace(
            PRESETS["gpt-tiny"], vocab_size=64, seq_length=16, hidden_dropout=0.1, attention_dropout=0.1
        ),
        parallel=replace(parallel, distributed_backend="gloo"),
        data=DataConfig(mock_data=True),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
        training=TrainingConfig(**given),
        checkpoint=CheckpointConfig(save=str(folder) if folder else None, save_interval=2),
    )


class Losses(Callback):
    """Collects the losses of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.losses.append(result.loss)


@dataclass(frozen=True)
class Ended:
    """How a run ended, and its tensors by name."""

    finding: Finding | None
    message: str
    iteration: int
    losses: list[float]
    tensors: dict[str, bytes]


def _run(topology: Topology, config: Config, callbacks: Sequence[Callback]) -> Ended:
    stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    losses, failure = Losses(), AuditFailed()
    with start_trainer(config, topology) as trainer:
        try:
            train(trainer, stop, [*callbacks, losses])
        except AuditFailed as error:
            failure = error
        held = held_tensors(trainer)
        tensors = {
            name: each.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, each in held.items()
        }
        return Ended(failure.finding, str(failure), trainer.progress.iteration, losses.losses, tensors)


def _with_and_without(topology: Topology, config: Config) -> tuple[Ended, Ended]:
    without = replace(config, training=replace(config.training, audit_interval=None))
    return _run(topology, config, [Audit()]), _run(topology, without, [])


def _check_same(config: Config, world_size: int) -> None:
    micro_batch_size = 4 // world_size  # two microbatches or more: the audit computes the first again
    config = replace(config, training=replace(config.training, micro_batch_size=micro_batch_size))
    for audited, plain in run_ranks(_with_and_without, config.parallel.mesh, world_size, config):
        assert audited.finding is None
        assert len(audited.losses) == 4
        assert audited == plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_audit_changes_nothing(layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    _check_same(_config(parallel), world_size)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_audit_changes_nothing_with(option: str) -> None:
    _check_same(replace(_config(DP2), **OPTIONS[option]), 2)


FP16 = OptimizerConfig(
    lr_decay_style="constant", initial_loss_scale=2.0**22, hysteresis=1, loss_scale_window=1
)
"""A loss scale with which some gradients overflow, and that changes in each iteration."""


def _with_dtype(config: Config, dtype: ParamsDtype) -> Config:
    """Return the config in a dtype of 16 bits; fp16 has a dynamic loss scale."""
    optimizer = FP16 if dtype == "fp16" else config.optimizer
    return replace(config, model=replace(config.model, params_dtype=dtype), optimizer=optimizer)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("bf16", "pp2 zero bubble"),  # gradients are held in another order than in the microbatch alone
        ("fp16", "dp2 zero1"),
        pytest.param("bf16", "dp2 zero3", marks=pytest.mark.slow),
        pytest.param("bf16", "tp2 sp", marks=pytest.mark.slow),
        pytest.param("fp16", "tp2 sp", marks=pytest.mark.slow),
        pytest.param("fp16", "pp2 zero bubble", marks=pytest.mark.slow),
    ],
)
def test_an_audit_changes_nothing_in_16_bits(dtype: ParamsDtype, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    _check_same(_with_dtype(_config(parallel), dtype), world_size)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_audit_changes_nothing_with_compiled_layers(dtype: ParamsDtype) -> None:
    _check_same(_with_dtype(_config(DP2, compile=True), dtype), 2)


class LossScales(Callback):
    """Collects the loss scales of a run, and whether its updates were skipped."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.scales.append(loop.trainer.optimizer.scaler.scale)
        self.skipped.append(result.skipped)


def _scales(topology: Topology, config: Config) -> LossScales:
    scales = LossScales()
    assert _run(topology, config, [Audit(), scales]).finding is None
    return scales


def test_audited_iterations_may_overflow(one_rank: Topology) -> None:
    """Audits of iterations with and without an infinite gradient pass, and the loss scale still changes."""
    config = _config(ParallelConfig(), train_iters=8, audit_interval=1)
    found = _scales(one_rank, _with_dtype(config, "fp16"))
    assert found.skipped[-2:] == [True, False]
    assert found.scales[-2:] == [2.0**19, 2.0**20]


def test_a_profile_of_modules_is_not_audited(one_rank: Topology, tmp_path: Path) -> None:
    """Its microbatches have other divisors than the iteration's; in the order of a run's callbacks."""
    config = _config(ParallelConfig(), train_iters=2, micro_batch_size=2)
    file = str(tmp_path / "modules.txt")
    config = replace(config, logging=LoggingConfig(profile_modules=2, profile_modules_file=file))
    with Writers(config.logging, one_rank, "", None) as writers:
        callbacks = default_callbacks(writers, config)
        chosen = [each for each in callbacks if isinstance(each, Audit | ModuleProfile)]
    assert len(chosen) == 2
    assert _run(one_rank, config, chosen).finding is None
    assert Path(file).exists()


def test_an_audit_changes_nothing_in_bert() -> None:
    config = _config(DP2)
    _check_same(replace(config, model=replace(PRESETS["bert-tiny"], vocab_size=64, seq_length=16)), 2)


def _with_flip(topology: Topology, config: Config, injected: BitFlip) -> Ended:
    return _run(topology, config, [Audit(), Injection(injected)])


@pytest.mark.parametrize(
    ("parallel", "kind", "iteration", "suspects", "clause"),
    [
        (DP3, "weights", 2, {1}, "differs between the ranks that hold the same"),
        (DP2, "weights", 2, {0, 1}, "differs between the ranks that hold the same"),
        (DP3, "sums of gradients", 2, {1}, "differs between the ranks that hold the same"),
        (DP3, "activations, always", 3, {1}, "and the wrong result repeats"),
        (DP2, "activations, always", 3, {0, 1}, "each replica that computes it again repeats its own"),
        (PP2, "activations", 2, {1}, "and the wrong result does not repeat"),
        (replace(DP2, zero_stage=2), "gradients", 2, {1}, "and the wrong result does not repeat"),
        (replace(DP2, zero_stage=3), "gradients", 2, {1}, "and the wrong result does not repeat"),
    ],
)
def test_a_flip_is_found(
    parallel: ParallelConfig, kind: str, iteration: int, suspects: set[int], clause: str
) -> None:
    world_size = (parallel.data_parallel_size or 1) * parallel.pp
    # A single flip in a microbatch is seen in the first one, which is the only one here.
    config = _config(parallel, global_batch_size=parallel.data_parallel_size or 1)
    for ended in run_ranks(
        _with_flip, config.parallel.mesh, world_size, config, BitFlip(kind, 1, iteration, 17)
    ):
        assert ended.finding is not None
        assert set(ended.finding.suspects) == suspects
        assert clause in ended.message
        audited = iteration + iteration % 2
        assert ended.message.startswith(f"the audit of iteration {audited} failed: ")
        assert ended.message.count("rank ") == len(suspects)
        assert "; the last audit passed after iteration 2, and " in ended.message or audited == 2


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "is_compiled"), [("bf16", False), ("fp16", False), ("fp32", True)])
@pytest.mark.parametrize("kind", ["weights", "activations, always"])
def test_a_flip_is_found_with(kind: str, dtype: ParamsDtype, is_compiled: bool) -> None:
    """In fp16 the loss scale may skip the update."""
    config = _with_dtype(_config(DP3, global_batch_size=3, compile=is_compiled), dtype)
    for ended in run_ranks(_with_flip, config.parallel.mesh, 3, config, BitFlip(kind, 1, 2, 17)):
        assert ended.finding is not None
        assert ended.finding.suspects == (1,)


class ChangedWeight(Callback):
    """Flips a bit of a weight on one rank."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        if loop.trainer.topology.rank == self.rank and loop.iteration == 3:
            flip(loop.trainer.optimizer.weight(self.name), 5)


def _with_changed_weight(topology: Topology, config: Config, rank: int, name: str) -> Ended:
    return _run(topology, config, [Audit(), ChangedWeight(rank, name)])


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        (PP2, "embedding.word.weight"),
        (ParallelConfig(tensor_model_parallel_size=2), "layers.1.mlp_norm.weight"),
        (TrialConfig(), "layers.1.mlp.up.weight"),
    ],
)
def test_every_copy_of_a_weight_is_compared(parallel: ParallelConfig, name: str) -> None:
    """Check copies of a tied table on two stages, of a norm on two tp ranks, and over an axis of no role."""
    config = _config(parallel)
    for ended in run_ranks(_with_changed_weight, config.parallel.mesh, 2, config, 1, name):
        assert ended.finding is not None
        assert f"model.{name}" in ended.finding.names
        assert ended.finding.suspects == (0, 1)
        assert ended.iteration == 4


def _with_saves(topology: Topology, config: Config, injected: BitFlip | None) -> Ended:
    callbacks = [Audit(), Checkpointing(), *([Injection(injected)] if injected else [])]
    return _run(topology, config, callbacks)


def test_later_checkpoints_are_withdrawn_and_the_last_good_one_is_kept(tmp_path: Path) -> None:
    config = _config(DP3, tmp_path, global_batch_size=3, train_iters=8, audit_interval=4)
    # Without the audit, the save of iteration 6 would delete that of iteration 4.
    config = replace(config, checkpoint=replace(config.checkpoint, keep_last=1))
    flipped = BitFlip("weights", 2, 5, 0)
    ended, *_ = run_ranks(_with_saves, config.parallel.mesh, 3, config, flipped)
    assert list(iterations_in(tmp_path)) == [4]
    assert read_latest(tmp_path) == "iter_0000004"
    assert (tmp_path / "unaudited_iter_0000006" / "run.json").is_file()
    assert ended.message.endswith(
        f"the last audit passed after iteration 4, and the last good checkpoint is {tmp_path}/iter_0000004 "
        "(renamed: unaudited_iter_0000006): start again without the device"
    )


def test_no_checkpoint_is_good_before_an_audit(tmp_path: Path) -> None:
    config = _config(DP3, tmp_path, global_batch_size=3, train_iters=8, audit_interval=4)
    ended, *_ = run_ranks(_with_saves, config.parallel.mesh, 3, config, BitFlip("weights", 2, 2, 0))
    assert not iterations_in(tmp_path)
    assert not (tmp_path / "latest").exists()
    assert (
        "; no audit has passed, and no checkpoint is good (renamed: unaudited_iter_0000002)" in ended.message
    )


def test_a_good_run_keeps_as_many_checkpoints_as_requested(one_rank: Topology, tmp_path: Path) -> None:
    config = _config(ParallelConfig(), tmp_path, train_iters=4)
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=1, keep_last=1))
    assert _with_saves(one_rank, config, None).finding is None
    assert list(iterations_in(tmp_path)) == [4]


def _resumed(topology: Topology, config: Config) -> int | None:
    stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    audit = Audit()
    with start_trainer(config, topology) as trainer:
        loaded = trainer.load()
        assert loaded is not None
        config = replace(config, training=replace(config.training, train_iters=6))
        assert train(trainer, stop, [audit], loaded.callbacks) == 0
    return audit.state()["last_passed"]


def test_a_resume_remembers_the_last_audit(one_rank: Topology, tmp_path: Path) -> None:
    config = _config(ParallelConfig(), tmp_path, audit_interval=3)
    assert _with_saves(one_rank, config, None).finding is None
    loads = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    longer = replace(loads, training=replace(config.training, train_iters=5))
    assert _resumed(one_rank, longer) == 3


def test_gpus_need_deterministic_kernels(one_rank: Topology) -> None:
    def loop(device: str, **training: Any) -> Any:
        topology = SimpleNamespace(device=torch.device(device))
        config = SimpleNamespace(training=TrainingConfig(audit_interval=5, **training))
        return SimpleNamespace(trainer=SimpleNamespace(topology=topology, config=config))

    check_determinism(loop("cuda", deterministic=True))
    check_determinism(loop("cpu"))
    with pytest.raises(UserError, match=r"--audit-interval 5 compares bits, .* --deterministic-mode"):
        check_determinism(loop("cuda"))
