"""Audits find flipped bits, name the rank and keep the last good checkpoint.

That they change nothing, and pass where gradients overflow, is shown in test_loop_observers.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.model.transformer import ParamsDtype
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import run_ranks as run_new_ranks
from megalite.distributed.topology import Topology
from megalite.train.callbacks.audit import Audit, check_determinism
from megalite.train.loop import Callback, Checkpointing, TrainingLoop, train
from megalite.train.replicas import AuditFailed, Finding
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange, Relayout, Trainer, start_trainer
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks
from tests.power.bit_flips import BitFlip, Injection, flip
from tests.trial_axis import TrialConfig

DP2 = ParallelConfig(data_parallel_size=2)
DP3 = ParallelConfig(data_parallel_size=3)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)


def _config(parallel: ParallelConfig, folder: Path | None = None, **training: Any) -> Config:
    given = {"global_batch_size": 2, "train_iters": 4, "eval_iters": 0, "audit_interval": 2, **training}
    return Config(
        model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16),
        parallel=replace(parallel, distributed_backend="gloo"),
        data=DataConfig(mock_data=True),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
        training=TrainingConfig(**given),
        checkpoint=CheckpointConfig(save=str(folder) if folder else None, save_interval=2),
    )


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    finding: Finding | None
    message: str
    iteration: int


def _run(
    topology: Topology,
    config: Config,
    callbacks: Sequence[Callback],
    layouts: Mapping[int, Relayout] | None = None,
) -> Ended:
    stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    failure = AuditFailed()
    with start_trainer(config, topology) as trainer:
        try:
            train(trainer, stop, callbacks, layouts=layouts)
        except AuditFailed as error:
            failure = error
        return Ended(failure.finding, str(failure), trainer.progress.iteration)


FP16 = OptimizerConfig(
    lr_decay_style="constant", initial_loss_scale=2.0**19, hysteresis=1, loss_scale_window=1
)
"""A loss scale with which some gradients overflow, and that changes in each iteration."""


def _with_dtype(config: Config, dtype: ParamsDtype) -> Config:
    """Return the config in a dtype of 16 bits; fp16 has a dynamic loss scale."""
    optimizer = FP16 if dtype == "fp16" else config.optimizer
    return replace(config, model=replace(config.model, params_dtype=dtype), optimizer=optimizer)


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
    """In fp16 the loss scale may skip the update. torch keeps what it has compiled: start new ranks."""
    config = _with_dtype(_config(DP3, global_batch_size=3, compile=is_compiled), dtype)
    for ended in run_new_ranks(_with_flip, config.parallel.mesh, 3, config, BitFlip(kind, 1, 2, 17)):
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


def _with_later_layout(topology: Topology, config: Config, rank: int) -> Ended:
    def relayout(trainer: Trainer) -> LayoutChange:
        raise AssertionError("the replicas differ")

    return _run(topology, config, [Audit(), ChangedWeight(rank, "layers.1.mlp.up.weight")], {3: relayout})


def test_a_change_of_the_layout_hides_no_difference() -> None:
    config = _config(DP2)
    for ended in run_ranks(_with_later_layout, config.parallel.mesh, 2, config, 1):
        assert ended.message.startswith("the audit of iteration 3 failed: model.layers.1.mlp.up.weight")


def _with_saves(topology: Topology, config: Config, injected: BitFlip | None) -> Ended:
    callbacks = [Audit(), Checkpointing(), *([Injection(injected)] if injected else [])]
    return _run(topology, config, callbacks)


def test_later_checkpoints_are_withdrawn_and_the_last_good_one_is_kept(tmp_path: Path) -> None:
    config = _config(DP2, tmp_path)
    # Without the audit, the save of iteration 3 would delete that of iteration 2.
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=1, keep_last=1))
    flipped = BitFlip("weights", 1, 3, 0)
    ended, *_ = run_ranks(_with_saves, config.parallel.mesh, 2, config, flipped)
    assert list(iterations_in(tmp_path)) == [2]
    assert read_latest(tmp_path) == "iter_0000002"
    assert (tmp_path / "unaudited_iter_0000003" / "run.json").is_file()
    assert ended.message.endswith(
        f"the last audit passed after iteration 2, and the last good checkpoint is {tmp_path}/iter_0000002 "
        "(withdrawn: unaudited_iter_0000003): start again without the device"
    )


def test_no_checkpoint_is_good_before_an_audit(tmp_path: Path) -> None:
    config = _config(DP2, tmp_path, audit_interval=3)
    ended, *_ = run_ranks(_with_saves, config.parallel.mesh, 2, config, BitFlip("weights", 1, 2, 0))
    assert not iterations_in(tmp_path)
    assert not (tmp_path / "latest").exists()
    assert (
        "; no audit has passed, and no checkpoint is good (withdrawn: unaudited_iter_0000002)"
        in ended.message
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


def test_gpus_need_deterministic_kernels() -> None:
    def loop(device: str, **training: Any) -> Any:
        topology = SimpleNamespace(device=torch.device(device))
        config = SimpleNamespace(training=TrainingConfig(audit_interval=5, **training))
        return SimpleNamespace(trainer=SimpleNamespace(topology=topology, config=config))

    check_determinism(loop("cuda", deterministic=True))
    check_determinism(loop("cpu"))
    with pytest.raises(UserError, match=r"--audit-interval 5 compares bits, .* --deterministic-mode"):
        check_determinism(loop("cuda"))
