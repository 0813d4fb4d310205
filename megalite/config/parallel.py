"""How the model is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags

GradCommunicationDtype = Literal["fp32", "bf16", "fp16"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]
Backend = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the axes and how their ranks talk; world size = tp x pp x dp."""

    tensor_model_parallel_size: int = field(default=1, metadata=flags("--tp"))
    """Ranks that share every layer's matrices (tp)."""
    pipeline_model_parallel_size: int = field(default=1, metadata=flags("--pp"))
    """Pipeline stages that the layers are spread over (pp)."""
    data_parallel_size: int | None = field(default=None, metadata=flags("--dp"))
    """Replicas of the model (dp); checked against world size / (tp x pp), which it is by default."""
    sequence_parallel: bool = False
    """Cut norms, dropout and the residual stream over tp by the sequence: less memory, the same traffic."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of forward and backward passes in the pipeline; zb-h1 and zb-v put weight gradients off."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Chunks of the model on each pipeline rank, two or more: 1f1b then means interleaved."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a chunk, instead of the number of chunks: 1f1b then means interleaved."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each stage, one number a stage (3 5), a stage a chunk; by default the same on every stage."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank; the others share the rest."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank; the others share the rest."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as one layer of the last stage."""
    pp_partition_method: str | None = None
    """Balance stages by uniform (layers), parameters, or type:REGEX (what DeepSpeed's class names match)."""
    ddp_bucket_size: int | None = None
    """Elements of a gradient bucket, sent once full; by default a sixth of the rank's, 1 to 40 million."""
    zero_stage: int = field(default=0, metadata=flags(sets={"--use-distributed-optimizer": 1}))
    """Data-parallel ranks share: 0 nothing, 1 main weights and moments, 2 gradients too, 3 weights too."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over the data-parallel ranks while backward still runs."""
    overlap_param_gather: bool = False
    """With --zero-stage 1 or 2, gather the updated weights while the next forward already runs."""
    grad_communication_dtype: GradCommunicationDtype | None = field(
        default=None, metadata=flags(sets={"--grad-reduce-in-bf16": "bf16"})
    )
    """Round gradients to this for their way between data-parallel ranks; by default they are not."""
    gradient_accumulation_fusion: bool = True
    """Let the products that make weights' gradients add to the sums of them; not with --zero-stage 3."""
    distributed_backend: Backend = "auto"
    """What the ranks talk through; auto is nccl on GPUs and gloo without."""
    distributed_timeout_minutes: int = 10
    """Minutes after which a collective that some rank does not join is an error."""
    num_threads: int | None = None
    """CPU threads of a rank; by default 1 where several ranks share the machine, else torch's choice."""

    keep_freed_memory: bool = True
    """Let a CPU rank keep freed memory for its next tensors: faster steps, for a third more memory or so."""

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline-parallel size: the number of stages."""
        return self.pipeline_model_parallel_size

    @property
    def schedule(self) -> str:
        """The pipeline's schedule: chunks make 1F1B the interleaved one; one rank has nothing to order."""
        if self.pp == 1:
            return "1f1b"
        layers, chunks = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        if self.pipeline_schedule == "1f1b" and (layers is not None or (chunks or 1) > 1):
            return "interleaved"
        return self.pipeline_schedule

    def zero_stage_among(self, num_replicas: int) -> int:
        """What the data-parallel ranks share out: one alone has nobody to share with."""
        return self.zero_stage if num_replicas > 1 else 0

    @property
    def has_given_ends(self) -> bool:
        """Whether the layers of the first or the last rank are given."""
        ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        return any(end is not None for end in ends)
