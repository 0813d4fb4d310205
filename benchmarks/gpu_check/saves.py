"""Stages 4 and 5: saves in the background, bit by bit against saves that block, with each ZeRO stage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_check.results import Result, passed
from benchmarks.gpu_check.runner import CheckContext
from benchmarks.gpu_check.several_ranks import RankHost, on_several_ranks
from megalite.checkpoint.folder import name_of
from megalite.checkpoint.saver import Saver
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.train.trainer import start_trainer

NUM_STEPS = 2
"""Iterations before the saves, and again while the save in the background runs."""
MODEL = ModelConfig(
    num_layers=8, hidden_size=1024, num_attention_heads=8, seq_length=64, vocab_size=4096, hidden_dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
"""Its state of 1.7 GB takes longer to copy than a step of 64 tokens takes: the update must wait."""
SMALL_MODEL = replace(
    MODEL, num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=128
)


class Case(NamedTuple):
    """Describes a run that saves."""

    zero_stage: int
    params_dtype: str
    is_offloaded: bool = False

    @property
    def name(self) -> str:
        """Return the case as flags."""
        offload = " --optimizer-cpu-offload" if self.is_offloaded else ""
        return f"--zero-stage {self.zero_stage} --params-dtype {self.params_dtype}{offload}"


CASES = (
    *(Case(zero_stage, dtype) for zero_stage in range(4) for dtype in ("bf16", "fp32")),
    Case(0, "bf16", is_offloaded=True),
    Case(1, "bf16", is_offloaded=True),
)


class Compared(NamedTuple):
    """Holds how the files of two saves of the same state compare.

    Attributes:
        unequal: names of files that differ, or that one save alone has.
        has_changed: whether the state changed while the save in the background ran; otherwise equal files
            prove nothing.
    """

    num_files: int
    unequal: list[str]
    has_changed: bool


def config_of(
    case: Case, model: ModelConfig, folder: Path, backend: str, *, shares_gpu: bool = False
) -> Config:
    """Return a run that saves to the folder in the background."""
    return Config(
        model=replace(model, params_dtype=case.params_dtype),  # type: ignore[arg-type]
        parallel=ParallelConfig(
            zero_stage=case.zero_stage,  # type: ignore[arg-type]
            distributed_backend=backend,  # type: ignore[arg-type]
            ranks_share_gpus=shares_gpu,
        ),
        optimizer=OptimizerConfig(
            lr=1e-2, lr_decay_style="constant", optimizer_cpu_offload=case.is_offloaded
        ),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=2, train_iters=100, eval_iters=0),
        checkpoint=CheckpointConfig(save=str(folder), async_save=True),
    )


def compare_saves(topology: Topology, config: Config) -> Compared:
    """Save the same state at once and in the background, go on training meanwhile, and compare the files."""
    assert config.checkpoint.save is not None
    folder = Path(config.checkpoint.save)
    with start_trainer(config, topology) as trainer:
        in_background = trainer.saver
        at_once = Saver(replace(config.checkpoint, save=str(folder / "at_once"), async_save=False), topology)
        for _ in range(NUM_STEPS):
            trainer.step()
        trainer.saver = at_once
        trainer.save()
        trainer.saver = in_background
        trainer.save()
        for _ in range(NUM_STEPS):
            trainer.step()
        in_background.finish()
        trainer.saver = at_once
        trainer.save()
    background, before, after = (
        _digests(checkpoint)
        for checkpoint in (
            folder / name_of(NUM_STEPS),
            folder / "at_once" / name_of(NUM_STEPS),
            folder / "at_once" / name_of(2 * NUM_STEPS),
        )
    )
    unequal = [
        name for name in sorted(before.keys() | background.keys()) if before.get(name) != background.get(name)
    ]
    tensors = [name for name in before if name.endswith(".safetensors")]
    return Compared(
        len(before), unequal, bool(tensors) and all(before[name] != after[name] for name in tensors)
    )


def _digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of a checkpoint's files, without the times of writing."""
    contents = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    run = json.loads(contents["run.json"])
    del run["written"]
    contents["run.json"] = json.dumps(run).encode()
    del contents["SHA256SUMS"]  # it has the digest of run.json
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def asynchronous(context: CheckContext) -> Iterator[Result]:
    """Compare both saves of each case of one rank."""
    for case in CASES:
        if case.zero_stage == 0:
            yield _result(case, context, 1, shares_gpu=False)


@on_several_ranks("asynchronous saves of 2 ranks")
def of_two_ranks(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Compare both saves of each case whose state ZeRO shards over replicas."""
    for case in CASES:
        if case.zero_stage > 0:
            yield _result(case, context, 2, shares_gpu=host.mps is not None)


def _result(case: Case, context: CheckContext, num_ranks: int, *, shares_gpu: bool) -> Result:
    folder = context.scratch / f"{case.zero_stage}_{case.params_dtype}_{case.is_offloaded}"
    (folder / "at_once").mkdir(parents=True)
    model, backend = (
        (SMALL_MODEL if context.is_small else MODEL),
        ("gloo" if context.device == "cpu" else "nccl"),
    )
    config = config_of(case, model, folder, backend, shares_gpu=shares_gpu)
    (compared, *_) = run_ranks(compare_saves, config.parallel.mesh, num_ranks, config)
    detail = f"unequal: {', '.join(compared.unequal)}" if compared.unequal else ""
    if not compared.has_changed:
        detail = "the state did not change while the save ran"
    is_equal = not compared.unequal and compared.has_changed
    return passed(f"async save, {case.name}", is_equal, f"{compared.num_files} files", "equal", detail)
