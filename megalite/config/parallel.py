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
    """Describe the layout of the ranks (world size = tp x pp x dp) and their communication."""

    tensor_model_parallel_size: int = field(default=1, metadata=flags("--tp"))
    """Tensor-parallel size: number of ranks that the matrices of each layer are split over."""
    pipeline_model_parallel_size: int = field(default=1, metadata=flags("--pp"))
    """Pipeline-parallel size: number of ranks that the layers are split over."""
    data_parallel_size: int | None = field(default=None, metadata=flags("--dp"))
    """Data-parallel size: number of replicas of the model. It must equal the default,
    world size / (tp x pp)."""
    sequence_parallel: bool = False
    """Shard norms, dropout and the residual stream along the sequence over the tensor-parallel ranks. This
    saves memory for the same communication."""
    pipeline_schedule: ScheduleName = field(
        default="1f1b", metadata=flags(sets={"--enable-zbh1-pipeline": "zb-h1"})
    )
    """Order of forward and backward passes in the pipeline. zb-h1 and zb-v (zero bubble) defer weight
    gradients."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Number of model chunks per pipeline rank. With two or more, 1f1b becomes interleaved."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Number of layers per model chunk, instead of the number of chunks; 1f1b becomes interleaved."""
    pipeline_layers: tuple[int, ...] | None = None
    """Number of layers of each pipeline stage, for example 3 5; with chunks, one number per chunk. By default
    all are equal."""
    decoder_first_pipeline_num_layers: int | None = None
    """Number of layers on the first pipeline rank; the rest is divided among the other ranks."""
    decoder_last_pipeline_num_layers: int | None = None
    """Number of layers on the last pipeline rank; the rest is divided among the other ranks."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as a layer of the last stage."""
    pp_partition_method: str | None = None
    """Balance the stages by uniform (number of layers), parameters, or type:REGEX (layers whose DeepSpeed
    class name matches)."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket. By default a sixth of the rank's parameters, between 1 and 40 million."""
    zero_stage: int = field(default=0, metadata=flags(sets={"--use-distributed-optimizer": 1}))
    """ZeRO stage, for sharding over data-parallel ranks. 0: shard nothing, 1: the optimizer state, 2: also
    gradients, 3: also weights."""
    data_parallel_shard_degree: int | None = field(
        default=None, metadata=flags(sets={"--shard-within-node": 0})
    )
    """Shard (ZeRO) within groups of this many neighbouring replicas, and replicate across groups. 0: a group
    is the replicas on a node. By default one group of all replicas."""
    num_distributed_optimizer_instances: int | None = None
    """Number of groups of replicas within which ZeRO shards; an alternative to
    --data-parallel-shard-degree."""
    fsdp_reshard_after_forward: ReshardAfterForward = "default"
    """With --zero-stage 3: free gathered weights after each use (always), or gather them once per iteration
    (never). default: never in a pipeline if they fit, else always."""
    overlap_grad_reduce: bool = True
    """Overlap the gradient reduction over replicas with the backward pass."""
    overlap_param_gather: bool | None = None
    """With --zero-stage 1 or 2: overlap the all-gather of updated weights with the next forward pass. On by
    default on GPUs only."""
    grad_communication_dtype: GradCommunicationDtype | None = field(
        default=None, metadata=flags(sets={"--grad-reduce-in-bf16": "bf16"})
    )
    """Precision of gradients in the data-parallel reduction. By default, and always for the exchange of tied
    embedding gradients between stages, the precision of the sums."""
    gradient_accumulation_fusion: bool = True
    """Accumulate weight gradients inside the GEMM that computes them; not with --zero-stage 3."""
    distributed_backend: Backend = "auto"
    """Communication backend. auto is nccl on GPUs and gloo on CPUs."""
    distributed_timeout_minutes: int = 10
    """Minutes before a collective fails because a rank has not joined it."""
    num_threads: int | None = None
    """CPU threads per rank. By default 1 if several ranks share the machine, otherwise torch's default."""

    keep_freed_memory: bool = True
    """Reuse freed memory on a CPU rank, instead of returning it to the operating system. Steps are faster,
    but need about a third more memory."""

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
        """Return the schedule, resolved: model chunks make 1f1b interleaved, and a single rank uses 1f1b."""
        if self.pp == 1:
            return "1f1b"
        layers, chunks = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        if self.pipeline_schedule == "1f1b" and (layers is not None or (chunks or 1) > 1):
            return "interleaved"
        return self.pipeline_schedule

    def zero_stage_among(self, num_shards: int) -> int:
        """Return the ZeRO stage of a group of `num_shards` ranks; a single rank has nothing to shard."""
        return self.zero_stage if num_shards > 1 else 0

    @property
    def shards_within_node(self) -> bool:
        """Return whether ZeRO shards over the replicas of a node, whatever their number."""
        return self.data_parallel_shard_degree == 0 and self.num_distributed_optimizer_instances is None

    def shard_degree_among(self, num_replicas: int, ranks_per_node: int) -> int:
        """Return the number of neighbouring replicas that ZeRO shards over.

        Args:
            num_replicas: data-parallel size.
            ranks_per_node: with `shards_within_node`, the result is the largest divisor of `num_replicas`
                whose tensor-parallel groups divide a node evenly; 1 if there is none.
        """
        if self.num_distributed_optimizer_instances is not None:
            return num_replicas // self.num_distributed_optimizer_instances
        if self.shards_within_node:
            whole = ranks_per_node // self.tp if ranks_per_node % self.tp == 0 else 1
            return math.gcd(num_replicas, whole)
        return self.data_parallel_shard_degree or num_replicas

    def gathers_under_forward(self, device_type: str) -> bool:
        """Return whether the all-gather of updated weights, if there is one, overlaps the next forward."""
        return device_type == "cuda" if self.overlap_param_gather is None else self.overlap_param_gather

    @property
    def has_given_ends(self) -> bool:
        """Return whether the number of layers of the first or the last rank is set."""
        ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        return any(end is not None for end in ends)
