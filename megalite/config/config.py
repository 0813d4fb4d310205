"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.batch_size import BatchSize
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.dry_run import DryRunConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.training import TrainingConfig


@dataclass(frozen=True)
class Config:
    """Everything a run is told. Parts of megalite take the sub-config they need, never the whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)

    def global_batch(self, dp: int) -> int:
        """Samples of one optimizer step over `dp` replicas, once a ramp-up has come to its end."""
        given = self.training.global_batch_size
        return self.training.micro_batch_size * dp if given is None else given

    def num_microbatches(self, dp: int) -> int:
        """Microbatches of one optimizer step on each of `dp` replicas, once a ramp-up is at its end."""
        return self.global_batch(dp) // (self.training.micro_batch_size * dp)

    def batch_size(self, dp: int) -> BatchSize:
        """The global batch of every iteration over `dp` replicas."""
        return BatchSize(self.global_batch(dp), self.training.rampup_batch_size)

    @property
    def hang_timeout(self) -> float:
        """Seconds without progress after which a rank is stuck; 0 for never."""
        given = self.training.hang_timeout
        return self.parallel.distributed_timeout_minutes * 60 / 2 if given is None else given

    def num_iterations(self, dp: int) -> int:
        """Optimizer steps of the whole run over `dp` replicas."""
        if self.training.train_samples is not None:
            return self.batch_size(dp).num_iterations(self.training.train_samples)
        return self.training.length

    def num_samples(self, dp: int) -> int:
        """Samples that the whole run trains on, over `dp` replicas."""
        if self.training.train_samples is not None:
            return self.training.train_samples
        return self.batch_size(dp).consumed_before(self.training.length + 1)
