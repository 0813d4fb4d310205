"""Training programs, as far as a plan depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalite.config import Config, ModelConfig
from megalite.hardware.gpus import Gpu


@dataclass(frozen=True)
class Program:
    """Training program, as far as a plan depends on it. The defaults describe megalite.

    Attributes:
        fused_attention: attention scores are never stored in GPU memory.
        cudnn_attention: fused attention is cuDNN's, not FlashAttention-2's. megalite's is not in blocks of
            context-parallel ranks' queries and keys.
        triton_attention: with dropout, ALiBi or documents, fused attention is megalite's own.
        triton_blocks: in blocks it is so without them, because FlashAttention does not compute the blocks.
        triton_recurrence: recurrences are computed by megalite's kernels, not in plain PyTorch.
        attention_slowdown: time of fused attention, relative to FlashAttention-2 or cuDNN.
        keeps_scores: the outputs of softmax and of its dropout are saved for backward.
        is_own: the program is megalite, whose layers are as recorded.
        fused_elementwise: rotary embedding runs within another kernel, and saves nothing of its own.
        copies_heads: queries, keys, values and attention's output are copied into another layout.
        tp_share: share of the tensor-parallel communication that is not hidden under split GEMMs.
        tp_hidden_share: share of the tensor-parallel communication in backward that runs under the GEMM of
            the weight gradient. Megatron-LM has overlapped them since the end of 2021.
        overlaps_tp: in forward, tensor-parallel collectives overlap with GEMMs as `tp_comm_overlap` requests.
        stops_recomputing: the recomputed forward ends where nothing more is saved, before the last GEMM.
        fused_accumulation: the weight gradient's GEMM adds it to its fp32 sum, and hides the memory accesses.
            It has no effect with ZeRO 3, where each gradient is reduced at once.
        gradient_bytes: bytes per element of the gradient kept between microbatches, with 16-bit weights.
        shared_copy_bytes: bytes per element of a gradient copy that is sharded with the optimizer state.
        keeps_gate: SwiGLU saves the output of its gate besides both of its halves.
        logit_copy_bytes: bytes per logit that the loss needs at its peak besides the 16-bit logits: 4 for a
            copy in fp32, 8 for a copy and its softmax, 0 for a fused loss like megalite's.
        loss_bytes: bytes per logit that a loss that is not fused reads and writes in forward and backward.
        buffer_bytes: maximum size of the communication buffers: three buckets of gradients. A bucket is never
            larger than the rank's gradients. DeepSpeed's buckets have 5e8 elements.
        sum_buffer_bytes: maximum size of a bucket of fp32 sums, which is flattened while it is reduced.
        splits_messages: each tensor-parallel rank sends its part of the hidden states to the next stage,
            which gathers them inside its node (Narayanan et al. 2021, section 4.1).
        one_adapter: collectives over nodes have the bandwidth of one network adapter per node.
        gathers_under_forward: with ZeRO 1 and 2, weights are gathered under the next forward by default.
        sends_tokens_once: messages of experts are DeepEP's: a token is sent once to each node and rank that
            has some of its experts, not once for each expert.
        consecutive_experts: instead of a router's choice, a token has the experts after those of the token
            before it.
        copies_slices: with ZeRO 1, the host copies gathered weights into the parameters in slices, one per
            parameter and replica (nanotron, distributed.py, all_gather_coalesced).
    """

    fused_attention: bool
    cudnn_attention: bool = False
    triton_attention: bool = False
    triton_blocks: bool = False
    triton_recurrence: bool = False
    attention_slowdown: float = 1.0
    keeps_scores: bool = False
    is_own: bool = False
    fused_elementwise: bool = False
    copies_heads: bool = True
    tp_share: float = 1.0
    tp_hidden_share: float = 0.5
    overlaps_tp: bool = False
    stops_recomputing: bool = False
    fused_accumulation: bool = False
    gradient_bytes: int = 4
    shared_copy_bytes: int = 0
    keeps_gate: bool = False
    logit_copy_bytes: int = 0
    loss_bytes: tuple[int, int] = (6 + 8, 4 + 12 + 6)
    buffer_bytes: float = 0.0
    sum_buffer_bytes: float = 0.0
    splits_messages: bool = False
    one_adapter: bool = False
    gathers_under_forward: bool = False
    copies_slices: bool = False
    sends_tokens_once: bool = False
    consecutive_experts: bool = False


def own_program(
    model: ModelConfig, gpu: Gpu, *, has_blocks: bool = False, has_documents: bool = False
) -> Program:
    """Return megalite as a program, with the attention that this GPU runs.

    Args:
        has_blocks: some layers compute attention in blocks of context-parallel ranks' queries and keys.
        has_documents: attention stays within the documents of a sample.
    """
    has_dropout, is_large = (
        model.attention_dropout > 0.0,
        model.max_head_dim > MAX_TRITON_HEAD,
    )
    fits_triton = model.params_dtype != "fp64" and not is_large
    can_run_triton = gpu.has_triton and fits_triton
    is_written_out = model.attention_backend in ("unfused", "local") or is_large
    is_written_out |= has_dropout and not can_run_triton
    if has_blocks and not can_run_triton:
        is_written_out |= has_documents or not _has_flash_blocks(model)
    return Program(
        fused_attention=not is_written_out,
        is_own=True,
        copies_heads=False,
        cudnn_attention=model.attention_backend not in ("flash", "efficient"),
        triton_attention=can_run_triton,
        triton_blocks=can_run_triton and not _has_flash_blocks(model),
        triton_recurrence=gpu.has_triton and _fits_recurrence_kernels(model),
        overlaps_tp=True,
        stops_recomputing=True,
        fused_accumulation=True,
        gathers_under_forward=True,
    )


def _fits_recurrence_kernels(model: ModelConfig) -> bool:
    """Return whether megalite's kernels compute the recurrences of a model that has some."""
    if not model.has_recurrent_layers or model.params_dtype == "fp64":
        return False
    heads = (
        (model.mamba.state_dim, model.mamba.head_dim)
        if model.has_mamba
        else (model.delta_net.key_dim, model.delta_net.value_dim)
    )
    return max(heads) <= MAX_TRITON_HEAD


def _has_flash_blocks(model: ModelConfig) -> bool:
    """Return whether FlashAttention computes the blocks, for whole samples as documents."""
    has_bias = model.position_embedding_type == "alibi" or model.attn_logit_softcapping is not None
    attention = (spec.attention for spec in model.layer_specs)
    has_bias |= any(spec is not None and spec.window is not None for spec in attention)
    sizes = {spec.head_dim for spec in model.head_specs}
    return not has_bias and sizes == {model.value_dim} and model.value_dim % 8 == 0


MEGATRON_LOSS_BYTES = (6 + 4 + 8 + 8 + 4 + 8, 8 + 6)
"""`loss_bytes` of Megatron-LM's loss, where each step is a kernel: conversion to fp32, maximum, subtraction,
exponentials, sum, division; and the multiplication and conversion of the gradient (its cross_entropy.py of
2020 to 2022). The default of `Program` are PyTorch's kernels: conversion and log-softmax; and zeros for the
gradient of the targets' logits, the gradient of log-softmax, and its conversion."""
MAX_TRITON_HEAD = 256
"""Largest head size of megalite's Triton kernels, and of FlashAttention and cuDNN."""
OWN = "megalite"
_MEGATRON = Program(
    fused_attention=False,
    keeps_scores=True,
    fused_elementwise=True,
    tp_hidden_share=0.0,
    logit_copy_bytes=8,
    loss_bytes=MEGATRON_LOSS_BYTES,
    splits_messages=True,
)
_MEGATRON_CORE = Program(
    fused_attention=True,
    cudnn_attention=True,
    fused_elementwise=True,
    tp_share=0.4,
    fused_accumulation=True,
    gradient_bytes=2,
    logit_copy_bytes=4,
)
PROGRAMS: Mapping[str, Program] = {
    "megatron-2021": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, gradient_bytes=2, shared_copy_bytes=4, buffer_bytes=3e9),
    "megatron-core": _MEGATRON_CORE,
    "megatron-core-deepep": replace(_MEGATRON_CORE, sends_tokens_once=True),
    "deepspeed-2021": replace(_MEGATRON, gradient_bytes=2, one_adapter=True),
    "plain-torch": Program(fused_attention=True, keeps_gate=True, logit_copy_bytes=4),
    "automodel-benchmark": Program(
        fused_attention=True,
        cudnn_attention=True,
        fused_elementwise=True,
        logit_copy_bytes=2,
        loss_bytes=(2 + 2, 2 + 6),
        sends_tokens_once=True,
        consecutive_experts=True,
    ),
}
"""Other programs: Megatron-LM before fused attention, BLOOM's fork of it on DeepSpeed, NVIDIA's version of
2024, the same with DeepEP, DeepSpeed of early 2021, programs that use torch's own attention and sharding, and
the benchmarks of NeMo AutoModel: layers of Transformer Engine, a loss in bf16, DeepEP, and a router that
selects experts in turn (`fake_balanced_gate`)."""


def program_named(name: str, config: Config, gpu: Gpu) -> Program:
    """Return the program of this name, `OWN` or one of `PROGRAMS`, as it trains a model on a GPU."""
    if name == OWN:
        return own_program(
            config.model,
            gpu,
            has_blocks=config.parallel.mesh.is_zigzag,
            has_documents=config.masks_documents,
        )
    return in_dtype(PROGRAMS[name], config.model.params_dtype)


def in_dtype(program: Program, params_dtype: str) -> Program:
    """Return a program as it trains in a precision: DeepSpeed has fp32 sums only with bf16 gradients."""
    if program.shared_copy_bytes and params_dtype == "bf16":
        return replace(program, gradient_bytes=6, shared_copy_bytes=0, sum_buffer_bytes=2e9)
    return program
