"""Lengths in tokens, as Megatron-DeepSpeed has them."""

from __future__ import annotations

import shlex

import pytest

from megalite.config import Config, check_config
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError

_BATCH = "--seq-length 100 --global-batch-size 4 --mock-data --vocab-size 256"


def run(line: str) -> tuple[Config, list[str]]:
    config, notices = parse(shlex.split(f"{_BATCH} {line}"))
    check_config(config)
    return config, [notice for notice in notices if "mock" not in notice]


def test_a_run_ends_with_the_batch_that_has_consumed_the_tokens() -> None:
    for tokens, samples in (("4000", 40), ("4001", 44), ("4.1e3", 44)):
        config, notices = run(f"--train-tokens {tokens}")
        assert (config.training.train_samples, config.training.train_iters) == (samples, None)
        assert notices == []


@pytest.mark.parametrize(("length", "decay"), [("--train-samples 120", 120), ("--train-iters 30", 120)])
def test_the_first_end_counts_and_the_schedule_keeps_the_other(length: str, decay: int) -> None:
    config, notices = run(f"{length} --train-tokens 4000")
    assert (config.training.train_samples, config.optimizer.lr_decay_samples) == (40, decay)
    assert notices == ["--train-tokens 4000 ends the run after 10 iterations"]
    config, notices = run(f"{length} --train-tokens 400000")
    assert (config.training.train_samples, config.optimizer.lr_decay_samples) == (120, None)
    assert notices == ["--train-tokens 400000 has no effect: the run ends earlier"]


def test_schedules_are_in_samples() -> None:
    config, notices = run("--train-iters 30 --lr-warmup-tokens 450 --lr-decay-tokens 9000")
    assert (config.optimizer.lr_warmup_samples, config.optimizer.lr_decay_samples) == (4, 90)
    assert config.training.train_samples == 120
    assert notices == []
    config, notices = run("--train-iters 30 --lr-warmup-iters 5 --lr-decay-iters 7 --lr-decay-tokens 9000")
    assert (config.optimizer.lr_warmup_samples, config.optimizer.lr_decay_samples) == (20, 90)
    assert (config.optimizer.lr_warmup_iters, config.optimizer.lr_decay_iters) == (0, None)
    assert notices == ["--lr-decay-iters 7 has no effect: --lr-decay-tokens replaces it"]


def test_a_ramp_up_counts() -> None:
    config, _ = run("--rampup-batch-size 2 2 6 --train-tokens 900")  # batches of 2, 2, 2, 4
    assert config.training.train_samples == 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--train-tokens", "--train-tokens takes one whole number of tokens above 0, but got none"),
        ("--train-tokens 1.5", "but got 1.5"),
        ("--lr-decay-tokens inf --train-iters 3", "but got inf"),
        ("--train-tokens 9 --rampup-batch-size 4", "--rampup-batch-size 4 has 1 numbers"),
        ("--train-tokens 9 --train-iters -5", "--train-iters -5 is out of range"),
        ("--train-tokens 9 --override-flags --global-batch-size 0", "--global-batch-size 0 is out of range"),
    ],
)
def test_wrong_lengths(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(line)
    (problem,) = caught.value.problems
    assert message in problem


def test_tokens_need_the_batch(problems) -> None:
    (problem,) = problems("--train-tokens 9 --mock-data --vocab-size 256")
    assert problem == "--train-tokens needs --global-batch-size: pass it"
