"""ZeRO stages: which options they can be combined with, and which have no effect then."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from megalite.config import check_config
from megalite.frontends.command_line import parse
from tests.command_line import mistakes_of

BASE = "--preset gpt-tiny --vocab-size 100 --mock-data --train-iters 2 --lr 1e-3 --dp 2"


@pytest.mark.parametrize(
    "schedule",
    ["", "--pipeline-schedule zb-h1", "--num-virtual-stages-per-pipeline-rank 2"],
    ids=["1f1b", "zero bubble", "interleaved"],
)
def test_stage_3_goes_with_a_pipeline(schedule: str) -> None:
    config, _ = parse(shlex.split(f"{BASE} --zero-stage 3 --pp 2 --global-batch-size 8 {schedule}"))
    check_config(config, 4)
    assert config.parallel.fsdp_reshard_after_forward == "default"


def test_gathered_weights_are_kept_with_stage_3_only() -> None:
    config, notices = parse(shlex.split(f"{BASE} --zero-stage 3 --fsdp-reshard-after-forward never"))
    assert config.parallel.fsdp_reshard_after_forward == "never"
    assert notices == []
    _, notices = parse(shlex.split(f"{BASE} --zero-stage 2 --fsdp-reshard-after-forward always"))
    (notice,) = notices
    assert notice.startswith("--fsdp-reshard-after-forward always has no effect: --zero-stage is 2, not 3")


def test_stage_3_goes_with_tensor_and_sequence_parallelism() -> None:
    config, _ = parse(shlex.split(f"{BASE} --zero-stage 3 --tp 2 --sequence-parallel"))
    check_config(config, 4)
    assert config.parallel.zero_stage == 3


@pytest.mark.parametrize(
    "flag",
    [
        "--overlap-param-gather",
        "--no-overlap-param-gather",
        "--no-overlap-grad-reduce",
        "--ddp-bucket-size 100",
    ],
)
def test_stage_3_leaves_the_buckets_options_without_effect(flag: str) -> None:
    _, notices = parse(shlex.split(f"{BASE} --zero-stage 3 {flag}"))
    assert [notice for notice in notices if notice.startswith(f"{flag} has no effect: ")]
    _, notices = parse(shlex.split(f"{BASE} --zero-stage 1 {flag}"))
    assert not [notice for notice in notices if flag.split()[0] in notice]


def test_the_dtype_of_messages_is_honoured() -> None:
    _, notices = parse(shlex.split(f"{BASE} --zero-stage 3 --grad-reduce-in-bf16"))
    assert not [notice for notice in notices if "effect" in notice]


@pytest.mark.parametrize(
    ("flag", "on_gpu", "on_cpu"),
    [("", True, False), ("--overlap-param-gather", True, True), ("--no-overlap-param-gather", False, False)],
)
def test_weights_are_gathered_under_forward_on_gpus_unless_it_is_set(
    flag: str, on_gpu: bool, on_cpu: bool
) -> None:
    """The config holds what was set, on any device: ranks and checkpoints compare that."""
    config, notices = parse(shlex.split(f"{BASE} --zero-stage 1 {flag}"))
    assert config.parallel.gathers_under_forward("cuda") is on_gpu
    assert config.parallel.gathers_under_forward("cpu") is on_cpu
    assert notices == []


@pytest.mark.parametrize(
    ("flags", "degree"),
    [
        ("", 8),
        ("--data-parallel-shard-degree 2", 2),
        ("--data-parallel-shard-degree 1", 1),
        ("--data-parallel-shard-degree 8", 8),
        ("--num-distributed-optimizer-instances 2", 4),
        ("--num-distributed-optimizer-instances 1", 8),
        ("--num-distributed-optimizer-instances 4 --data-parallel-shard-degree 2", 2),
        ("--shard-within-node", 4),
    ],
)
def test_the_groups_that_zero_shards_within(flags: str, degree: int) -> None:
    """Of eight replicas of two ranks, on nodes of eight ranks."""
    config, _ = parse(shlex.split(f"{BASE.removesuffix(' --dp 2')} --tp 2 --zero-stage 1 {flags}"))
    check_config(config, 16)
    assert config.parallel.shard_degree_among(8, 8) == degree


@pytest.mark.parametrize(
    ("tp", "replicas", "node", "degree"),
    [(1, 12, 8, 4), (2, 6, 8, 2), (8, 4, 8, 1), (3, 4, 8, 1), (1, 2, 8, 2)],
)
def test_groups_within_nodes_never_span_two(tp: int, replicas: int, node: int, degree: int) -> None:
    config, _ = parse(shlex.split(f"{BASE} --zero-stage 1 --shard-within-node"))
    parallel = replace(config.parallel, tensor_model_parallel_size=tp)
    assert parallel.shard_degree_among(replicas, node) == degree
    for stage in range(2):
        first = stage * replicas * tp
        for group in range(replicas // degree):
            ranks = [first + (group * degree + i) * tp for i in range(degree)]
            assert degree == 1 or len({rank // node for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--zero-stage 1 --data-parallel-shard-degree 3",
            "--data-parallel-shard-degree 3 does not divide the number of replicas 8: pass 2, or another "
            "divisor of it",
        ),
        (
            "--zero-stage 3 --num-distributed-optimizer-instances 16",
            "--num-distributed-optimizer-instances 16 does not divide the number of replicas 8: pass 8, or "
            "another divisor of it",
        ),
        (
            "--data-parallel-shard-degree 4",
            "--data-parallel-shard-degree 4 with --zero-stage 0, which shards nothing: pass --zero-stage 1, "
            "2 or 3 too, or remove it",
        ),
        (
            "--num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances 2 with --zero-stage 0, which shards nothing: pass "
            "--zero-stage 1, 2 or 3 too, or remove it",
        ),
        (
            "--zero-stage 1 --data-parallel-shard-degree 4 --num-distributed-optimizer-instances 4",
            "--data-parallel-shard-degree 4 and --num-distributed-optimizer-instances 4 contradict each "
            "other with 8 replicas: remove one of them",
        ),
        (
            "--zero-stage 1 --shard-within-node --dry-run",
            "--data-parallel-shard-degree 0 (--shard-within-node) with --dry-run, which has no nodes: pass "
            "--data-parallel-shard-degree N, the number of replicas on a node",
        ),
        (
            "--zero-stage 1 --data-parallel-shard-degree -1",
            "--data-parallel-shard-degree -1 is out of range: it must be at least 0",
        ),
    ],
)
def test_groups_that_cannot_be(flags: str, message: str) -> None:
    assert mistakes_of(f"{BASE.removesuffix(' --dp 2')} {flags}", 8) == [message]


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        (
            "--zero-stage 1 --data-parallel-shard-degree 1",
            "--zero-stage 1 has no effect: each group of replicas that it shards over has one rank: pass a "
            "larger --data-parallel-shard-degree",
        ),
        (
            "--num-distributed-optimizer-instances 1",
            "--num-distributed-optimizer-instances 1 has no effect: --zero-stage is 0",
        ),
    ],
)
def test_groups_without_effect(flags: str, notice: str) -> None:
    _, notices = parse(shlex.split(f"{BASE} {flags}"))
    assert notice in notices
