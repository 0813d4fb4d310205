"""ZeRO stages: which options they can be combined with, and which have no effect then."""

from __future__ import annotations

import shlex

import pytest

from megalite.config import check_config
from megalite.config.command_line import parse

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
    assert notice.startswith("--fsdp-reshard-after-forward always has no effect: only --zero-stage 3")


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
