"""A dry run of many microbatches runs a few, and counts what a run of all of them counts."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace

import pytest

from megalite.distributed.topology import Topology
from megalite.frontends.command_line import parse
from megalite.observe.meta_tensors import meta_tensors
from megalite.plan.dry_run import counts as counting
from megalite.plan.dry_run.counts import count_iteration, repetition_of
from megalite.train.run_context import build_data, resolve_run

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--attention-dropout 0 --attention-backend fused --train-iters 4 --lr 1e-3 --bf16 --micro-batch-size 1"
)
CASES = [
    ("--pp 1", 0, 18),
    ("--pp 1 --use-distributed-optimizer --dp 2", 0, 18),
    ("--pp 4", 0, 24),
    ("--pp 4 --tp 2 --sequence-parallel --recompute-granularity full", 5, 24),
    ("--pp 4 --dp 2 --zero-stage 2", 7, 24),
    ("--pp 2 --pipeline-schedule interleaved", 0, 24),
    ("--pp 2 --pipeline-schedule interleaved", 1, 25),
    ("--pp 4 --pipeline-schedule zb-h1", 2, 32),
    ("--pp 2 --pipeline-schedule zb-v", 0, 24),
    ("--pp 2 --pipeline-schedule zb-v", 1, 25),
    ("--pp 2 --cpu-offload-activations 1 --seq-length 512", 0, 18),
]


def counts_of(layout: str, rank: int, microbatches: int, *, shortened: bool) -> counting.Counts:
    config, _ = parse(shlex.split(f"{MODEL} {layout}"))
    parallel = config.parallel
    dp = parallel.data_parallel_size or 1
    config, _ = parse(shlex.split(f"{MODEL} {layout} --global-batch-size {microbatches * dp}"))
    with Topology.fake(parallel.mesh, parallel.tp * parallel.pp * dp, rank) as topology, meta_tensors():
        repetition = repetition_of(config, topology.pp, microbatches) if shortened else None
        assert (repetition is not None) == shortened
        run = resolve_run(config, topology)
        return count_iteration(run, build_data(run), repetition)


@pytest.mark.parametrize(("layout", "rank", "microbatches"), CASES)
def test_a_shorter_iteration_has_the_same_counts(
    layout: str, rank: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = counts_of(layout, rank, microbatches, shortened=False)
    ran: list[int] = []
    step = counting.Trainer.step
    monkeypatch.setattr(
        counting.Trainer,
        "step",
        lambda self: ran.append(self.config.training.global_batch_size) or step(self),
    )
    assert counts_of(layout, rank, microbatches, shortened=True) == whole
    assert (whole.copied.down > 0) == (whole.copied.up > 0) == ("offload" in layout)
    assert len(ran) == 1  # it did not fall back on the whole iteration
    assert ran[0] < microbatches * (2 if "--dp 2" in layout else 1)


def test_a_schedule_without_a_steady_state_is_run_whole() -> None:
    config, _ = parse(shlex.split(f"{MODEL} --pp 2 --pipeline-schedule gpipe --global-batch-size 64"))
    with Topology.fake(config.parallel.mesh, 2, 0) as topology:
        assert repetition_of(config, topology.pp, 64) is None


def test_few_microbatches_are_all_run() -> None:
    config, _ = parse(shlex.split(f"{MODEL} --pp 2 --global-batch-size 8"))
    with Topology.fake(config.parallel.mesh, 2, 0) as topology:
        assert repetition_of(config, topology.pp, 8) is None


def test_a_part_that_does_something_else_the_second_time_is_not_repeated() -> None:
    def mark(i: int, number: int) -> counting._Mark:
        copied = counting.CopiedBytes(number, 2 * number)
        parts = counting.Counter({"mlp": 10 * i + 7})
        return counting._Mark(10 * i, 10 * i + 7, parts, counting.Counter({"send": number}), copied)

    marks = [mark(i, i) for i in range(4)]
    assert counting._extended(marks, 5) == counting._Mark(
        *(30 + 5 * 10, 37 + 5 * 10, counting.Counter({"mlp": 37, "other": 5 * 10})),
        *(counting.Counter({"send": 3 + 5}), counting.CopiedBytes(3 + 5, 2 * (3 + 5))),
    )
    for changed in (mark(2, 3), replace(marks[2], copied=counting.CopiedBytes(2, 5))):
        assert counting._extended([*marks[:2], changed, marks[3]], 5) is None


def test_a_long_iteration_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counting, "PROGRESS_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger="megalite"):
        counts_of("--pp 1", 0, 40, shortened=True)
    lines = [record.message for record in caplog.records if record.message.startswith("dry run: ")]
    assert lines[0] == f"dry run: 0 of {len(lines)} actions done"
    assert len(lines) < 2 * 40
