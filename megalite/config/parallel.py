"""The configuration of parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags
from megalite.pipeline.schedules import ScheduleName

GradCommunicationDtype = Literal["fp32", "bf16", "fp16"]
Backend = Literal["auto", "gloo", "nccl"]
ReshardAfterForward = Literal["default", "always", "never"]


@dataclass(frozen=True)
class ParallelConfig:
    """Describe the layout of ranks, world size = tp x pp x dp, and their communication."""

    tensor_model_parallel_size: int = field(default=1, metadata=flags("--tp"))
    """Tensor-parallel size: ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = field(default=1, metadata=flags("--pp"))
    """Pipeline-parallel size: ranks that the layers are distributed over."""
    data_parallel_size: int | None = field(default=None, metadata=flags("--dp"))
    """Data-parallel size: replicas of the model. By default world size / (tp x pp), which it must equal."""
    sequence_parallel: bool = False
    """Shard norms, dropout and the residual stream over tp by sequence. This saves memory for the same
    communication."""
    pipeline_schedule: ScheduleName = field(
        default="1f1b", metadata=flags(sets={"--enable-zbh1-pipeline": "zb-h1"})
    )
    """Order of forward and backward passes in the pipeline. zb-h1 and zb-v (zero bubble) defer weight
    gradients."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks per pipeline rank. With two or more, 1f1b becomes interleaved."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per model chunk, instead of the number of chunks; 1f1b becomes interleaved."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage, for example 3 5; with chunks, one number per chunk. By default all are
    equal."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank; the other ranks share the rest."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank; the other ranks share the rest."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer with the loss as a layer of the last stage."""
    pp_partition_method: str | None = None
    """Balance the stages by uniform (number of layers), parameters, or type:REGEX (layers whose DeepSpeed
    class name matches)."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket. By default a sixth of the rank's, between 1 and 40 million."""
    zero_stage: int = field(default=0, metadata=flags(sets={"--use-distributed-optimizer": 1}))
    """ZeRO stage: what data-parallel ranks shard. 0: nothing, 1: the optimizer state, 2: gradients too, 3:
    weights too."""
    data_parallel_shard_degree: int | None = field(
        default=None, metadata=flags(sets={"--shard-within-node": 0})
    )
    """Number of neighbouring replicas that ZeRO shards over; the groups of them replicate the shards. 0: the
    replicas of a node. By default all replicas."""
    num_distributed_optimizer_instances: int | None = None
    """Number of groups of replicas that ZeRO shards within; the alternative to
    --data-parallel-shard-degree."""
    fsdp_reshard_after_forward: ReshardAfterForward = "default"
    """With --zero-stage 3: free gathered weights after each use (always), or gather them once per iteration
    (never). default: never in a pipeline where they fit, else always."""
    overlap_grad_reduce: bool = True
    """Overlap the gradient reduction over data-parallel ranks with the backward pass."""
    overlap_param_gather: bool | None = None
    """Overlap the all-gather of updated weights with the next forward pass; with --zero-stage 1 or 2. By
    default on GPUs only."""
    grad_communication_dtype: GradCommunicationDtype | None = field(
        default=None, metadata=flags(sets={"--grad-reduce-in-bf16": "bf16"})
    )
    """Precision of gradients in the data-parallel reduction. By default that of the gradient sums, in which
    pipeline stages always exchange the gradient of a tied embedding."""
    gradient_accumulation_fusion: bool = True
    """Accumulate weight gradients inside the GEMM that computes them; not with --zero-stage 3."""
    distributed_backend: Backend = "auto"
    """Communication backend. auto is nccl on GPUs and gloo on CPUs."""
    distributed_timeout_minutes: int = 10
    """Minutes until a collective fails that some rank does not join."""
    num_threads: int | None = None
    """CPU threads per rank. By default 1 if several ranks share the machine, otherwise torch's default."""

    keep_freed_memory: bool = True
    """Reuse freed memory on a CPU rank instead of returning it. Steps are faster, but need about a third more
    memory."""

    @property
    def tp(self) -> int:
        """Return the tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Return the pipeline-parallel size."""
        return self.pipeline_model_parallel_size

    @property
    def schedule(self) -> ScheduleName:
        """Return the schedule, resolved: model chunks make 1f1b interleaved; a single rank has 1f1b."""
        if self.pp == 1:
            return "1f1b"
        layers, chunks = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        if self.pipeline_schedule == "1f1b" and (layers is not None or (chunks or 1) > 1):
            return "interleaved"
        return self.pipeline_schedule

    def zero_stage_among(self, num_shards: int) -> int:
        """Return the ZeRO stage of a group of `num_shards` ranks; a single one has nothing to shard."""
        return self.zero_stage if num_shards > 1 else 0

    @property
    def shards_within_node(self) -> bool:
        """Return whether ZeRO shards over the replicas of a node, whatever their number."""
        return self.data_parallel_shard_degree == 0 and self.num_distributed_optimizer_instances is None

    def shard_degree_among(self, num_replicas: int, ranks_per_node: int) -> int:
        """Return how many neighbouring replicas ZeRO shards over.

        Args:
            num_replicas: data-parallel size.
            ranks_per_node: the replicas of a node are the largest number that divides `num_replicas` and
                whose tensor-parallel ranks divide a node's; 1 if there is none.
        """
        if self.num_distributed_optimizer_instances is not None:
            return num_replicas // self.num_distributed_optimizer_instances
        if self.shards_within_node:
            whole = ranks_per_node // self.tp if ranks_per_node % self.tp == 0 else 1
            return math.gcd(num_replicas, whole)
        return self.data_parallel_shard_degree or num_replicas

    def gathers_under_forward(self, device_type: str) -> bool:
        """Return whether the all-gather of updated weights overlaps the next forward, where there is one."""
        return device_type == "cuda" if self.overlap_param_gather is None else self.overlap_param_gather

    @property
    def has_given_ends(self) -> bool:
        """Return whether the layers of the first or the last rank are set."""
        ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        return any(end is not None for end in ends)
