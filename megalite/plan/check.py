"""Whether a job can be: the config's own rules, and the cluster's."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import Config
from megalite.config.problem import Problem
from megalite.config.validate import RULES, problems_of
from megalite.plan.cluster import Cluster

_NOT_PLANNED = 1
"""Iterations that stand for a run's length where none is given: no rule of a layout asks for it."""


def job_problems(config: Config, cluster: Cluster, cp: int = 1) -> list[str]:
    """What training would refuse."""
    return problems_of(_with_length(config), cluster.world_size // cp)


def first_problem(config: Config, cluster: Cluster, cp: int = 1) -> Problem | None:
    """The first rule between fields that a sound config breaks by its layout."""
    config = _with_length(config)
    for rule in RULES:
        for problem in rule(config, cluster.world_size // cp):
            return problem
    return None


def _with_length(config: Config) -> Config:
    training = config.training
    if training.train_iters is not None or training.train_samples is not None:
        return config
    return replace(config, training=replace(training, train_iters=_NOT_PLANNED))
