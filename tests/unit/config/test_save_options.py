"""Options of saving: what they need, and when they have no effect."""

from __future__ import annotations

import dataclasses

import pytest

from megalite.config import check_config
from megalite.config.command_line import parse
from megalite.config.unused_options import unused_options
from megalite.errors import UserError

BASE = ("--mock-data", "--vocab-size", "100", "--train-iters", "8")
LOCAL = ("--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-dir", "/dev/shm/megalite")


def problems_with(*flags: str) -> str:
    """Return the errors of a command line."""
    with pytest.raises(UserError) as caught:
        check_config(parse([*BASE, *flags])[0], 1)
    return str(caught.value)


def test_non_persistent_saves_need_a_place_and_a_run() -> None:
    text = problems_with("--non-persistent-save-interval", "2")
    assert "--non-persistent-save-interval 2 needs --non-persistent-local-ckpt-dir" in text
    assert "--non-persistent-save-interval 2 needs --save" in text


@pytest.mark.parametrize("kind", ["global", "in_memory"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    text = problems_with("--save", "x", *LOCAL, "--non-persistent-ckpt-type", kind)
    assert f"--non-persistent-ckpt-type cannot be '{kind}': choose one of local" in text


def test_megatrons_flags_are_taken() -> None:
    flags = ["--save", "x", *LOCAL, "--non-persistent-ckpt-type", "local", "--async-save"]
    config, _ = parse([*BASE, *flags, "--exit-on-save-failure"])
    check_config(config, 1)
    checkpoint = config.checkpoint
    assert (checkpoint.non_persistent_save_interval, checkpoint.async_save) == (2, True)
    assert not [line for line in unused_options(config) if "save" in line or "persistent" in line]


def test_what_has_no_effect_is_told() -> None:
    config, _ = parse([*BASE, "--async-save", "--exit-on-save-failure", *LOCAL[2:]])
    message = "\n".join(unused_options(config))
    for name in ("async-save", "exit-on-save-failure", "non-persistent-local-ckpt-dir"):
        assert f"--{name}" in message
    saved = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save="x"))
    assert "--async-save has no effect: the run saves only at its end" in "\n".join(unused_options(saved))
    by_time = dataclasses.replace(saved.checkpoint, save_interval_minutes=5.0)
    assert "--async-save" not in "\n".join(unused_options(dataclasses.replace(saved, checkpoint=by_time)))
    unsaved = dataclasses.replace(config, checkpoint=dataclasses.replace(by_time, save=None))
    assert "--save-interval-minutes 5.0 has no effect: --save is not set" in unused_options(unsaved)
