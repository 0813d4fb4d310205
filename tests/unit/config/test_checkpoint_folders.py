"""Options that select the checkpoint to load and those to keep."""

from __future__ import annotations

import shlex

import pytest

from megalite.config import CheckpointConfig, check_config
from megalite.config.command_line import parse
from megalite.errors import ConfigError

ENOUGH = "--train-iters 100 --data-path p --tokenizer-type byte "


def read(line: str) -> tuple[CheckpointConfig, list[str]]:
    config, notices = parse(shlex.split(ENOUGH + line))
    check_config(config, None)
    return config.checkpoint, notices


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--load A --load-iteration 20", "load_iteration", 20),
        ("--load A --ckpt-step 0", "load_iteration", 0),
        ("--save A --keep-last 2", "keep_last", 2),
        ("--save A --keep-every 100", "keep_every", 100),
        ("--save A --save-retain-interval 100", "keep_every", 100),
    ],
)
def test_flags_and_megatrons_are_taken(line: str, name: str, value: int) -> None:
    checkpoint, notices = read(line)
    assert getattr(checkpoint, name) == value
    assert not notices


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--load A --load-iteration -1", "--load-iteration -1 is out of range: it must be at least 0"),
        (
            "--save A --keep-last 0",
            "--keep-last 0 is out of range: it must be greater than 0 and below 2**31",
        ),
        ("--save A --keep-every 0", "--keep-every 0 is out of range: it must be greater than 0"),
    ],
)
def test_what_is_out_of_range_is_told(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert caught.value.problems == (message,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--load-iteration 5", "--load-iteration 5 has no effect: --load is not set"),
        ("--keep-last 5", "--keep-last 5 has no effect: --save is not set"),
        ("--keep-every 5", "--keep-every 5 has no effect: --save is not set"),
    ],
)
def test_what_has_no_effect_is_told(line: str, message: str) -> None:
    assert read(line)[1] == [message]
