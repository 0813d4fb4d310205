"""A config on a cluster: the sizes that everything else is worked out from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megalite.config import Config
from megalite.config.stages import layers_per_stage, num_chunks
from megalite.pipeline.schedule import SCHEDULES
from megalite.pipeline.stages import StageMap
from megalite.plan.cluster import Cluster
from megalite.plan.program import Program


@dataclass(frozen=True)
class Job:
    """What runs, and on what.

    Attributes:
        cp: context-parallel size: ranks that share a sample's positions. Training here has no such axis; a
            plan of somebody else's run may.
        program: what trains.
    """

    config: Config
    cluster: Cluster
    program: Program
    cp: int = 1

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        return self.config.parallel.pp

    @cached_property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.cluster.world_size // (self.tp * self.pp * self.cp)

    @property
    def num_sharing(self) -> int:
        """Ranks that hold the same weights, and sum their gradients or share the optimizer's state."""
        return self.dp * self.cp

    @cached_property
    def num_microbatches(self) -> int:
        return max(1, self.config.num_microbatches(self.dp))

    @cached_property
    def global_batch(self) -> int:
        return self.config.global_batch(self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.config.training.micro_batch_size * self.config.model.seq_length // self.cp

    @property
    def zero_stage(self) -> int:
        return self.config.parallel.zero_stage_among(self.num_sharing)

    @property
    def slices(self) -> int:
        """Parts that norms and the residual stream are cut into over tp."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    @cached_property
    def stages(self) -> StageMap:
        return SCHEDULES[self.config.parallel.schedule].stage_map(self.pp, num_chunks(self.config))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each global stage."""
        return layers_per_stage(self.config)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of an activation's element."""
        return {"fp64": 8, "fp32": 4}.get(self.config.model.params_dtype, 2)
