"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.training import TrainingConfig
from megalite.config.validate import problems_of
from megalite.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Everything a run is told. Parts of megalite take the sub-config they need, never the whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def validate(self, world_size: int | None = None) -> None:
        """Checks every field and every rule between fields.

        Args:
            world_size: ranks that were started; None leaves out what depends on it.

        Raises:
            ConfigError: with all mistakes, each naming the flags, their values and the fix.
        """
        if problems := problems_of(self, world_size):
            raise ConfigError(problems)

    def global_batch(self, dp: int) -> int:
        """Samples of one optimizer step over `dp` replicas."""
        given = self.training.global_batch_size
        return self.training.micro_batch_size * dp if given is None else given

    def num_microbatches(self, dp: int) -> int:
        """Microbatches of one optimizer step on each of `dp` replicas."""
        return self.global_batch(dp) // (self.training.micro_batch_size * dp)
