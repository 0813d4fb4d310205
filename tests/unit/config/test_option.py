"""The rules for resumed runs, and for ranks with different values."""

from __future__ import annotations

from dataclasses import fields

from megalite.config import OptimizerConfig
from megalite.config.fields import config_fields, resume_rule
from megalite.config.option import OnResume


def test_ranks_may_differ_in_nothing_that_changes_the_run() -> None:
    differing = [field for field in config_fields() if field.declared.differs_between_ranks]
    assert {field.name for field in differing} > {"data_cache_path", "dry_run"}
    assert {field.on_resume for field in differing} == {OnResume.FREE}


def test_no_field_of_the_optimizer_is_ignored() -> None:
    # Where the update happens does not change it.
    names = [field.name for field in fields(OptimizerConfig) if "offload" not in field.name]
    assert {resume_rule(name) for name in names} == {OnResume.SCHEDULE, OnResume.SETTING, OnResume.LOGGED}
    logged = [name for name in names if resume_rule(name) is OnResume.LOGGED]
    # None changes an update, but for the rounding of its moments.
    assert logged == ["exp_avg_dtype", "exp_avg_sq_dtype", "initial_loss_scale", "ema_decay"]
