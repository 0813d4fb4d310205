"""Advice to a run out of memory: its numbers are those of the planner with the advised flags."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.frontends.command_line import parse
from megalite.plan.advice import NUM_REMEDIES, Device, advise, changes, divided_further
from megalite.plan.communication import Cluster
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import rank_memories
from megalite.utils.hardware.gpus import GPUS

RUN = "--mock-data --train-iters 10 --lr 1e-4 --attention-dropout 0 --bf16"
DEVICE = Device(80e9, 2.2e9)


def config_of(line: str) -> Config:
    config, _ = parse(shlex.split(f"{line} {RUN}"))
    return config


def totals(config: Config, world_size: int) -> list[float]:
    """Return the planned memory of each pipeline rank."""
    gpu = replace(GPUS["a100-80"], residual_gb=DEVICE.residual_bytes / 1e9)
    run = PlannedRun(config, Cluster(gpu, world_size, 8, 300, 25))
    return [memory.total for memory in rank_memories(run)]


LINES = [
    ("--preset gpt3-175b --tp 8 --pp 8 --micro-batch-size 4 --global-batch-size 1536", 1024),
    ("--preset gpt2-124m --micro-batch-size 8", 1),
    ("--preset llama3-70b --tp 8 --use-distributed-optimizer --recompute-granularity full", 16),
    ("--preset llama3-8b --fp8 --tp 2 --zero-stage 1 --global-batch-size 64", 16),
    ("--preset llama3-8b --zero-stage 2 --recompute-granularity full --data-parallel-shard-degree 4", 16),
]


@pytest.mark.parametrize(("line", "world_size"), LINES)
def test_figures_are_the_planners(line: str, world_size: int) -> None:
    config = config_of(line)
    advice = advise(config, world_size, 0, DEVICE)
    now = totals(config, world_size)[0]
    assert advice.memory.total == pytest.approx(now)
    assert 1 <= len(advice.remedies) <= NUM_REMEDIES
    for change, saved, _ in advice.remedies:
        then = totals(change.config, change.world_size or world_size)
        assert saved == pytest.approx(now - (then[0] if change.world_size is None else max(then)))
        assert saved > 0


@pytest.mark.parametrize(("line", "world_size"), LINES)
def test_none_that_is_missing_would_save_more(line: str, world_size: int) -> None:
    config = config_of(line)
    advice = advise(config, world_size, 0, DEVICE)
    others = [remedy for remedy in advice.remedies if not remedy.suffices]
    savings = [remedy.saved for remedy in others]
    assert savings == sorted(savings, reverse=True)
    kinds = {remedy.change.kind for remedy in advice.remedies}
    assert len(kinds) == len(advice.remedies)
    for change in changes(config, world_size):
        if others and change.kind not in kinds and change.world_size is None:
            saved = totals(config, world_size)[0] - totals(change.config, world_size)[0]
            assert saved <= savings[-1]


def test_flags_that_suffice_come_first_and_the_cheapest_of_them_first() -> None:
    line = "--preset gpt2-124m --position-embedding-type rope --micro-batch-size 24"
    now = totals(config_of(line), 1)[0] / 1e9
    advice = advise(config_of(line), 1, 0, replace(DEVICE, memory_bytes=16e9))
    assert 0.94 * 16 < now < 16
    assert [(remedy.change.flags, remedy.suffices) for remedy in advice.remedies] == [
        ("--recompute-granularity selective", True),
        ("--micro-batch-size 12", True),
        ("--tp 2", True),
    ]
    assert advice.remedies[0].saved < advice.remedies[1].saved
    advice = advise(config_of(line), 1, 0, replace(DEVICE, memory_bytes=11e9))
    assert [remedy.change.flags for remedy in advice.remedies if remedy.suffices] == [
        "--micro-batch-size 12",
        "--recompute-granularity full",
        "--tp 2",
    ]


@pytest.mark.parametrize(
    ("groups", "advised"),
    [
        ("--data-parallel-shard-degree 4", "--data-parallel-shard-degree 16"),
        ("--num-distributed-optimizer-instances 4", "--num-distributed-optimizer-instances 1"),
        ("--shard-within-node", "--data-parallel-shard-degree 16"),
        ("", None),
        ("--data-parallel-shard-degree 16", None),
    ],
)
def test_one_group_of_all_replicas_is_advised_where_there_are_several(
    groups: str, advised: str | None
) -> None:
    config = config_of(f"--preset llama3-8b --zero-stage 3 --recompute-granularity full {groups}")
    found = [
        remedy.change for remedy in advise(config, 16, 0, DEVICE).remedies if remedy.change.kind == "groups"
    ]
    assert [change.flags for change in found] == ([advised] if advised else [])
    for change in found:
        flags = config_of(f"--preset llama3-8b --zero-stage 3 --recompute-granularity full {change.flags}")
        assert totals(flags, 16) == totals(change.config, 16)


def advised(line: str, world_size: int, memory: float) -> dict[str, str]:
    """Return the advised flags by kind, for GPUs of this many GB."""
    device = replace(DEVICE, memory_bytes=memory * 1e9)
    remedies = advise(config_of(line), world_size, 0, device).remedies
    return {remedy.change.kind: remedy.change.flags for remedy in remedies}


@pytest.mark.parametrize(
    ("stage", "memory", "flags"),
    [
        (0, 80, "--use-distributed-optimizer"),
        (0, 40, "--zero-stage 2"),
        (1, 40, "--zero-stage 2"),
        (0, 24, "--zero-stage 3"),
        (2, 24, "--zero-stage 3"),
        (0, 16, "--zero-stage 3"),  # none fits
        (0, 180, "--zero-stage 3"),  # it fits as planned, but has run out of memory
        (3, 16, None),
    ],
)
def test_the_cheapest_zero_stage_that_fits_is_advised(stage: int, memory: float, flags: str | None) -> None:
    line = f"--preset llama3-8b --micro-batch-size 1 --recompute-granularity full --zero-stage {stage}"
    sizes = [totals(with_fields(config_of(line), zero_stage=each), 16)[0] / 1e9 for each in range(4)]
    assert sizes == pytest.approx([160, 64, 32, 20], abs=0.5)
    assert advised(line, 16, memory).get("zero") == flags


def test_stage_3_is_not_advised_where_each_group_has_one_replica() -> None:
    line = "--preset llama3-8b --recompute-granularity full --zero-stage 1 --data-parallel-shard-degree 1"
    assert advised(line, 16, 24)["groups"] == "--data-parallel-shard-degree 16"
    assert "zero" not in advised(line, 16, 24)


def test_what_is_on_already_or_refused_is_not_advised() -> None:
    config = config_of(
        "--num-layers 2 --hidden-size 6144 --num-attention-heads 3 --seq-length 2048 --vocab-size 500 "
        "--recompute-granularity full --micro-batch-size 1 --optimizer-cpu-offload"
    )
    message = advise(config, 1, 0, DEVICE).remedies
    assert [remedy.change.flags for remedy in message] == ["--pp 2"]  # 3 heads have no half, 1 sample neither
    flags = {change.flags for change in changes(config, 1)}
    assert flags == {"--tp 2", "--pp 2", "--cpu-offload-activations 2"}
    offloaded = with_fields(config, cpu_offload_activations=2)
    assert {change.flags for change in changes(offloaded, 1)} == {"--tp 2", "--pp 2"}


def test_offload_is_advised_where_layers_are_recomputed_already() -> None:
    line = (
        "--preset llama3-70b --tp 8 --seq-length 65536 --max-position-embeddings 65536 --micro-batch-size 1"
    )
    config = with_fields(config_of(line), recompute_granularity="full", optimizer_cpu_offload=True)
    found = {change.flags: saved for change, saved, _ in advise(config, 64, 0, DEVICE).remedies}
    assert found["--cpu-offload-activations 80"] > 50e9


@pytest.mark.parametrize(
    ("is_host", "flags"), [(False, "--optimizer-cpu-offload"), (True, "--optimizer-nvme-offload DIR")]
)
def test_optimizer_state_leaves_the_memory_that_is_full(is_host: bool, flags: str) -> None:
    config = config_of("--preset gpt-1.3b --micro-batch-size 1 --recompute-granularity full")
    advice = advise(config, 1, 0, replace(DEVICE, is_host=is_host))
    change, saved, _ = advice.remedies[0]
    assert change.flags == flags
    assert saved == pytest.approx(1.06 * advice.memory.optimizer)  # and its share of fragmentation
    assert advice.memory.optimizer == 12 * advice.memory.weights / 2


def test_lines_say_what_takes_it_and_what_would_help() -> None:
    line, world_size = LINES[0]
    first, *rest = advise(config_of(line), world_size, 0, DEVICE).lines()
    assert first.startswith("the planned memory of this rank is ")
    assert first.index("activations") < first.index("optimizer") < first.index("weights")
    assert [text.split(" would save ")[0] for text in rest] == [
        "--recompute-granularity full",
        "--sequence-parallel",
        "--micro-batch-size 2",
    ]


def test_samples_and_experts_are_divided_further() -> None:
    line = "--preset mixtral-8x7b --micro-batch-size 1 --seq-length 16384"

    def flags(more: str) -> list[str]:
        return [change.flags for change in divided_further(config_of(f"{line} {more}"), 16)]

    assert flags("") == ["--ep 2", "--cp 2"]
    assert flags("--ep 4 --cp 2") == ["--ep 8"]  # slices of 8192 tokens are short enough
    assert flags("--tp 2 --sequence-parallel") == ["--ep 2 --etp 1", "--cp 2"]
    assert flags("--tp 2 --sequence-parallel --ep 2") == ["--ep 4", "--cp 2"]
    config = config_of(f"{line} --zero-stage 3 --recompute-granularity full --optimizer-cpu-offload")
    advice = advise(config, 16, 0, replace(DEVICE, memory_bytes=40e9))
    assert advice.routing is None
    now, saved = totals(config, 16)[0], {each.change.kind: each.saved for each in advice.remedies}
    for change in divided_further(config, 16):
        if change.kind in saved:
            assert saved[change.kind] == pytest.approx(now - max(totals(change.config, 16)))


def test_advice_names_the_use_of_experts_that_it_assumes() -> None:
    config = config_of("--preset mixtral-8x7b --seq-length 4096 --ep 8 --moe-imbalance 1.5")
    lines = list(advise(config, 16, 0, DEVICE).lines())
    assert lines[1].startswith(
        "the plan assumes --moe-imbalance 1.5: the busiest rank's experts compute 1.5 "
    )
    even = config_of("--preset mixtral-8x7b --seq-length 4096 --ep 8")
    assert totals(config, 16)[0] > totals(even, 16)[0]
