"""Flags of saves: what they need, and where they are without effect."""

from __future__ import annotations

import dataclasses

import pytest

from megalite.cli import parse
from megalite.config import check_config
from megalite.config.idle import idle_options
from megalite.errors import UserError

BASE = ("--mock-data", "--vocab-size", "100", "--train-iters", "8")
LOCAL = ("--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-dir", "/dev/shm/megalite")


def told(*flags: str) -> str:
    """What is wrong with a command line."""
    with pytest.raises(UserError) as caught:
        check_config(parse([*BASE, *flags])[0], 1)
    return str(caught.value)


def test_non_persistent_saves_need_a_place_and_a_run() -> None:
    text = told("--non-persistent-save-interval", "2")
    assert "--non-persistent-save-interval 2 needs --non-persistent-local-ckpt-dir" in text
    assert "--non-persistent-save-interval 2 needs --save" in text


@pytest.mark.parametrize("kind", ["global", "in_memory"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    text = told("--save", "x", *LOCAL, "--non-persistent-ckpt-type", kind)
    assert f"--non-persistent-ckpt-type cannot be '{kind}': choose one of local" in text


def test_megatrons_flags_are_taken() -> None:
    flags = ["--save", "x", *LOCAL, "--non-persistent-ckpt-type", "local", "--async-save"]
    config, _ = parse([*BASE, *flags, "--exit-on-save-failure"])
    check_config(config, 1)
    checkpoint = config.checkpoint
    assert (checkpoint.non_persistent_save_interval, checkpoint.async_save) == (2, True)
    assert not [line for line in idle_options(config) if "save" in line or "persistent" in line]


def test_what_has_no_effect_is_told() -> None:
    config, _ = parse([*BASE, "--async-save", "--exit-on-save-failure", *LOCAL[2:]])
    told = "\n".join(idle_options(config))
    for name in ("async-save", "exit-on-save-failure", "non-persistent-local-ckpt-dir"):
        assert f"--{name}" in told
    saved = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save="x"))
    assert "--async-save True is without effect: only the end is saved" in "\n".join(idle_options(saved))
