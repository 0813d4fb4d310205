"""Frozen dataclasses that describe a run; one noun a file, `Config` holds them all.

The docstring under a field is its help on the command line.
"""

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.config import Config
from megalite.config.data import DataConfig
from megalite.config.dry_run import DryRunConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.text import to_yaml
from megalite.config.training import TrainingConfig
from megalite.config.validate import check_config

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DryRunConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RecomputeConfig",
    "TrainingConfig",
    "check_config",
    "to_yaml",
]
