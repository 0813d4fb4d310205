"""Every config field has a rule for resumed runs, and for ranks with different values."""

from __future__ import annotations

from collections import Counter

from megalite.config import OptimizerConfig
from megalite.config.fields import config_fields
from megalite.config.model_fields import MODEL_OPTIONS
from megalite.config.option import OnResume
from megalite.config.resume_rules import _NAMES, MAY_DIFFER_BETWEEN_RANKS, RESUME_RULES

GROUP_OF = {field.name: field.group for field in config_fields()}


def test_a_new_field_must_be_given_a_rule() -> None:
    """Check that every field has one rule: `ModelConfig` declares its own, `_NAMES` has the others."""
    assert set(RESUME_RULES) ^ set(GROUP_OF) == set()
    counted = Counter([*MODEL_OPTIONS, *(name for names in _NAMES.values() for name in names.split())])
    assert [name for name, count in counted.items() if count > 1] == []


def test_ranks_may_differ_in_nothing_that_changes_the_run() -> None:
    assert set(GROUP_OF) >= MAY_DIFFER_BETWEEN_RANKS
    assert {RESUME_RULES[name] for name in MAY_DIFFER_BETWEEN_RANKS} == {OnResume.FREE}


def test_no_field_of_the_optimizer_is_ignored() -> None:
    # Where the update happens does not change it.
    names = [name for name in OptimizerConfig.__dataclass_fields__ if "offload" not in name]
    assert {RESUME_RULES[name] for name in names} == {OnResume.SCHEDULE, OnResume.SETTING, OnResume.LOGGED}
    logged = [name for name in names if RESUME_RULES[name] is OnResume.LOGGED]
    assert logged == ["initial_loss_scale", "ema_decay"]  # neither changes an update
