"""A planned run: config, cluster and program, from which everything else is estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megalite.config import Config, ModelConfig
from megalite.config.stage_layers import layers_per_stage, stage_map
from megalite.config.validate import RULES, problems_of
from megalite.errors import Problem
from megalite.hardware.gpus import Gpu
from megalite.pipeline.schedules import SCHEDULES, StageMap


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes with equal GPUs. Ranks fill one node after the other.

    Attributes:
        node_gbps: gigabytes per second from a GPU to others in its node, one way.
        network_gbps: gigabytes per second from a GPU to other nodes, one way, while all GPUs of its node
            send.
    """

    gpu: Gpu
    world_size: int
    gpus_per_node: int
    node_gbps: float
    network_gbps: float

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes. The last node may be used only in part."""
        return -(-self.world_size // self.gpus_per_node)


@dataclass(frozen=True)
class Program:
    """A training program, as far as a plan depends on it. The defaults describe megalite.

    Attributes:
        fused_attention: attention scores are never stored in GPU memory.
        cudnn_attention: fused attention is cuDNN's, not FlashAttention-2's.
        triton_attention: fused attention is megalite's own, with dropout.
        keeps_scores: the outputs of softmax and of its dropout are saved for backward.
        fused_elementwise: norms, activations and additions of a layer run as a few kernels.
        tp_share: share of the tensor-parallel communication that is not hidden under split GEMMs.
        tp_hidden_share: share of the tensor-parallel communication in backward that runs under the GEMM of
            the weight gradient. Megatron-LM has overlapped them since the end of 2021.
        fused_accumulation: the weight gradient's GEMM adds it to its fp32 sum, and hides the memory accesses.
            It has no effect with ZeRO 3, where each gradient is reduced at once.
        gradient_bytes: bytes per element of the gradient kept between microbatches, with 16-bit weights.
        shared_copy_bytes: bytes per element of a gradient copy that is sharded with the optimizer state.
        keeps_gathered: with sequence parallelism, a GEMM's gathered input is saved for backward.
        keeps_gate: SwiGLU saves the output of its gate besides both of its halves.
        logit_copy_bytes: bytes per logit that the loss needs at its peak besides the 16-bit logits: 4 for a
            copy in fp32, 8 for a copy and its softmax.
        buffer_bytes: maximum size of the communication buffers: three buckets of gradients. A bucket is never
            larger than the rank's gradients. DeepSpeed's buckets have 5e8 elements.
        sum_buffer_bytes: maximum size of a bucket of fp32 sums, which is flattened while it is reduced.
        splits_messages: each tensor-parallel rank sends its part of the hidden states to the next stage,
            which gathers them inside its node (Narayanan et al. 2021, section 4.1).
        one_adapter: collectives over nodes have the bandwidth of one network adapter per node.
        gathers_under_forward: with ZeRO 1 and 2, weights are gathered under the next forward by default.
        copies_slices: with ZeRO 1, the host copies gathered weights into the parameters in slices, one per
            parameter and replica (nanotron, distributed.py, all_gather_coalesced).
    """

    fused_attention: bool
    cudnn_attention: bool = False
    triton_attention: bool = False
    keeps_scores: bool = False
    fused_elementwise: bool = False
    tp_share: float = 1.0
    tp_hidden_share: float = 0.5
    fused_accumulation: bool = False
    gradient_bytes: int = 4
    shared_copy_bytes: int = 0
    keeps_gathered: bool = False
    keeps_gate: bool = False
    logit_copy_bytes: int = 0
    buffer_bytes: float = 0.0
    sum_buffer_bytes: float = 0.0
    splits_messages: bool = False
    one_adapter: bool = False
    gathers_under_forward: bool = False
    copies_slices: bool = False


def own_program(model: ModelConfig, gpu: Gpu) -> Program:
    """Return megalite as a program, with the attention that this GPU runs."""
    has_dropout = model.attention_dropout > 0.0
    can_run_triton = gpu.has_triton and model.params_dtype != "fp64" and model.head_dim <= MAX_TRITON_HEAD
    is_written_out = model.attention_backend in ("unfused", "local") or (has_dropout and not can_run_triton)
    return Program(
        fused_attention=not is_written_out,
        triton_attention=has_dropout,
        fused_accumulation=True,
        gathers_under_forward=True,
    )


MAX_TRITON_HEAD = 256
"""Largest head size of megalite's Triton attention."""
OWN = "megalite"
_MEGATRON = Program(
    fused_attention=False,
    keeps_scores=True,
    fused_elementwise=True,
    tp_hidden_share=0.0,
    logit_copy_bytes=8,
    splits_messages=True,
)
PROGRAMS: Mapping[str, Program] = {
    "megatron-2021": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, gradient_bytes=2, shared_copy_bytes=4, buffer_bytes=3e9),
    "megatron-core": Program(
        fused_attention=True,
        cudnn_attention=True,
        fused_elementwise=True,
        tp_share=0.4,
        fused_accumulation=True,
        gradient_bytes=2,
        logit_copy_bytes=4,
    ),
    "deepspeed-2021": replace(_MEGATRON, gradient_bytes=2, one_adapter=True),
    "plain-torch": Program(fused_attention=True, keeps_gate=True, logit_copy_bytes=4),
}
"""Other programs: Megatron-LM before fused attention, BLOOM's fork of it on DeepSpeed, NVIDIA's version of
2024, DeepSpeed of early 2021, and programs that use torch's own attention and sharding."""


def program_named(name: str, model: ModelConfig, gpu: Gpu) -> Program:
    """Return the program of this name, `OWN` or one of `PROGRAMS`, as it trains a model on a GPU."""
    return own_program(model, gpu) if name == OWN else in_dtype(PROGRAMS[name], model.params_dtype)


def in_dtype(program: Program, params_dtype: str) -> Program:
    """Return a program as it trains in a precision: DeepSpeed has fp32 sums only with bf16 gradients."""
    if program.shared_copy_bytes and params_dtype == "bf16":
        return replace(program, gradient_bytes=6, shared_copy_bytes=0, sum_buffer_bytes=2e9)
    return program


@dataclass(frozen=True)
class PlannedRun:
    """A planned run: the config, the program, and the cluster.

    Attributes:
        program: the training program.
        cp: context-parallel size: number of ranks that share a sample's positions. megalite has no context
            parallelism, but another program's run may have it.
        full_weights_fit: in a pipeline with ZeRO stage 3, whether a stage's full weights fit. Set by
            `choose_gathering`.
    """

    config: Config
    cluster: Cluster
    program: Program
    cp: int = 1
    full_weights_fit: bool = False

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        return self.config.parallel.pp

    @cached_property
    def dp(self) -> int:
        """Return the number of replicas of the model."""
        return self.cluster.world_size // (self.tp * self.pp * self.cp)

    @property
    def num_sharing(self) -> int:
        """Return the number of ranks with the same weights, which reduce gradients or shard their state."""
        return self.dp * self.cp

    @property
    def num_shards(self) -> int:
        """Return the number of ranks that ZeRO shards over. Groups of that size replicate the shards."""
        return self.config.parallel.shard_degree_among(self.num_sharing, self.cluster.gpus_per_node)

    @cached_property
    def num_microbatches(self) -> int:
        return max(1, self.config.num_microbatches(self.dp))

    @cached_property
    def global_batch(self) -> int:
        return self.config.global_batch(self.dp)

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch on one rank."""
        return self.config.training.micro_batch_size * self.config.model.seq_length // self.cp

    @property
    def zero_stage(self) -> int:
        return self.config.parallel.zero_stage_among(self.num_shards)

    @property
    def gathers_once(self) -> bool:
        """Return whether ZeRO stage 3 gathers each weight once per iteration, not for each microbatch."""
        choice = self.config.parallel.fsdp_reshard_after_forward
        fits = choice == "default" and self.pp > 1 and self.full_weights_fit
        return self.zero_stage == 3 and (choice == "never" or fits)

    @property
    def all_reduces_once(self) -> bool:
        """Return whether, with ZeRO stage 3, ranks with the same shards all-reduce once per iteration.

        They all-reduce for each microbatch if messages have 16 bits, since sums in 16 bits would lose digits,
        and if a zero-bubble schedule reduces a layer's gradients in two messages.
        """
        parallel = self.config.parallel
        is_exact = parallel.grad_communication_dtype in (None, "fp32")
        return is_exact and not SCHEDULES[parallel.schedule].splits_backward

    @property
    def gathers_under_forward(self) -> bool:
        """Return whether updated weights, if they are gathered, are gathered under the next forward."""
        requested = self.config.parallel.overlap_param_gather
        return self.program.gathers_under_forward if requested is None else requested

    @property
    def num_sequence_shards(self) -> int:
        """Return how many tensor-parallel ranks norms and the residual stream are sharded over."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    @cached_property
    def stages(self) -> StageMap:
        return stage_map(self.config)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the layers of each global stage."""
        return layers_per_stage(self.config)

    @property
    def element_bytes(self) -> int:
        """Return the bytes per element of weights and activations."""
        return {"fp64": 8, "fp32": 4}.get(self.config.model.params_dtype, 2)

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of a microbatch's hidden states, before sequence parallelism."""
        return self.tokens * self.config.model.hidden_size * self.element_bytes


_ANY_LENGTH = 1
"""Iterations of a run without a length. A plan does not need one, and no layout rule depends on it."""


def run_problems(config: Config, cluster: Cluster, cp: int = 1) -> list[str]:
    """Return the problems because of which training would reject the run."""
    return problems_of(_with_length(config), cluster.world_size // cp)


def first_problem(config: Config, cluster: Cluster, cp: int = 1) -> Problem | None:
    """Return the first rule between fields that the layout breaks; the fields themselves are valid."""
    config = _with_length(config)
    for rule in RULES:
        for problem in rule(config, cluster.world_size // cp):
            return problem
    return None


def _with_length(config: Config) -> Config:
    training = config.training
    if training.train_iters is not None or training.train_samples is not None:
        return config
    return replace(config, training=replace(training, train_iters=_ANY_LENGTH))
