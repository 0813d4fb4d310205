"""Configuration of a run: frozen dataclasses, their validation, and the command line.

Values that follow from a config alone are computed here too: batch sizes, schedules of the learning rate, the
layers of each stage, and model FLOPs.

The docstring under a field is its `--help`.
"""

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.config import Config
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model.attention import AttentionSpec
from megalite.config.model.layers import LayerSpec
from megalite.config.model.model_config import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.training import DryRunConfig, TrainingConfig
from megalite.config.validate import check_config
from megalite.config.yaml_file import to_yaml

__all__ = [
    "AttentionSpec",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DryRunConfig",
    "LayerSpec",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RecomputeConfig",
    "TrainingConfig",
    "check_config",
    "to_yaml",
]
