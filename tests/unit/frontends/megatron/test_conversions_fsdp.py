"""Megatron-FSDP's flags: its strategies are the stages of ZeRO."""

from __future__ import annotations

import shlex

import pytest

from megalite.frontends.command_line import parse

BASE = "--mock-data --vocab-size 64 --train-iters 2 --bf16"


@pytest.mark.parametrize("switch", ["--use-megatron-fsdp", "--use_custom_fsdp"])
@pytest.mark.parametrize(
    ("strategy", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)]
)
def test_a_strategy_is_a_stage(strategy: str, stage: int, switch: str) -> None:
    """Megatron needs --use-distributed-optimizer, which alone is stage 1, beside each strategy."""
    line = f"{BASE} {switch} --use_distributed_optimizer --data-parallel-sharding-strategy {strategy}"
    config, notices = parse(shlex.split(line))
    assert config.parallel.zero_stage == stage
    assert notices == []


def test_messages_have_the_precision_of_its_flag() -> None:
    line = f"{BASE} --use-megatron-fsdp --megatron-fsdp-grad-comm-dtype"
    assert parse(shlex.split(f"{line} bf16"))[0].parallel.grad_communication_dtype == "bf16"
    assert parse(shlex.split(f"{line} auto"))[0].parallel.grad_communication_dtype is None


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (
            "--data-parallel-sharding-strategy optim",
            "--data-parallel-sharding-strategy optim has no effect: --use-megatron-fsdp is not set",
        ),
        ("--megatron-fsdp-main-grads-dtype bf16", "bf16 is not needed: gradients are summed in fp32"),
        (
            "--fsdp-double-buffer",
            "--fsdp-double-buffer is not needed: it sets where gathered weights are stored",
        ),
        ("--outer-dp-sharding-strategy no_shard", "no_shard is not needed: it is always so"),
    ],
)
def test_what_has_no_effect_is_reported(line: str, notice: str) -> None:
    config, notices = parse(shlex.split(f"{BASE} {line}"))
    assert config.parallel.zero_stage == 0
    assert len(notices) == 1
    assert notice in notices[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "--zero-stage 1 --data-parallel-sharding-strategy optim_grads_params",
            "--zero-stage 1 and --data-parallel-sharding-strategy optim_grads_params set the same option",
        ),
        (
            "--data-parallel-sharding-strategy full",
            "--data-parallel-sharding-strategy cannot be 'full': choose one of no_shard, optim, optim_grads",
        ),
        (
            "--grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32",
            "--grad-reduce-in-bf16 and --megatron-fsdp-grad-comm-dtype fp32 set the same option",
        ),
        (
            "--megatron-fsdp-grad-comm-dtype fp8",
            "--megatron-fsdp-grad-comm-dtype cannot be 'fp8': choose one",
        ),
        ("--outer-dp-sharding-strategy optim", "--outer-dp-sharding-strategy only accepts no_shard"),
    ],
)
def test_what_is_refused(line: str, problem: str, problems) -> None:
    assert problem in problems(f"{BASE} --use-megatron-fsdp {line}")[0]


def test_the_switch_takes_no_value(problems) -> None:
    assert problems(f"{BASE} --use-megatron-fsdp 3")[0] == "--use-megatron-fsdp takes no value, but got 3"
