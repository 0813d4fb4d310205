"""Read published runs from the lines of a CSV file, as planned runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.other_programs import (
    MEGATRON_LOSS_BYTES,
    PROGRAMS,
    OtherProgram,
    OtherRun,
    in_dtype,
    other_run,
)
from megalite.config import Config, ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.config.model.feed_forward import Activation
from megalite.config.model.transformer import PositionEmbedding
from megalite.config.recompute import Module
from megalite.plan.communication import Cluster
from megalite.plan.layout_fields import with_even_stages
from megalite.plan.planned_run import Kernels
from megalite.utils.hardware.gpus import find_gpu

OTHER_NETWORKS = {"BigScience": 1.58, "DeepSpeed": 1.6}
"""Gigabytes per second from a GPU to other nodes, in sources with unusual nodes.

Jean Zay's nodes have four adapters of 100 Gb/s, but do not reach that: an all-reduce over four of the A100
nodes had 40.5 Gb/s (bigscience-workshop/bigscience, experiments/bandwidth/README.md, early in 2022). If this
is a node's bandwidth, each of its GPUs has 0.63 GB/s; if it is one adapter's, each has 2.53 GB/s. The value
is their geometric mean, over `link_share`. The nodes were repaired on 25 February 2022, during these runs.

The 16 V100s of the autotuner's table have one adapter of 100 Gb/s for eight GPUs."""
TRITON_SLOWDOWN = math.sqrt(1.3 * 2.5)
"""Time of FlashAttention in Triton of 2022, relative to FlashAttention-2: the geometric mean of the published
range (Dao 2023, arXiv 2307.08691, section 4)."""
PROGRAM_NAMES: Mapping[str, str] = {
    "Megatron-LM README Sep": "megatron-2021",
    "Megatron-LM README H100": "megatron-core",
    "Narayanan": "megatron-2021",
    "Korthikanti": "megatron-2021",
    "Megatron-Turing": "megatron-2021",
    "BigScience": "megatron-deepspeed",
    "Azure ML guide": "megatron-deepspeed",
    "NVIDIA DGX": "megatron-core",
    "Llama-3": "megatron-core",
}
"""Names of programs, by the prefix of the source's name. Other sources run plain PyTorch."""
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "Korthikanti": {"tp_hidden_share": 0.5, "fused_accumulation": True},
    "Azure ML guide": {"fused_elementwise": False, "buffer_bytes": 1e9},
    "karpathy": {"kernels": Kernels("cudnn"), "fused_elementwise": True},
    "nanotron": {  # its loss has Megatron-LM's steps (functional.py, sharded_cross_entropy)
        "copies_slices": True,
        "logit_copy_bytes": 8,
        "loss_bytes": MEGATRON_LOSS_BYTES,
    },
    # The benchmarks' attn_impl is triton (submit_benchmarks.py), and MPT's loss is fused by default.
    "MosaicML": {"kernels": Kernels("flash", slowdown=TRITON_SLOWDOWN), "logit_copy_bytes": 0},
    "IBM fms-fsdp": {"fused_elementwise": True, "stops_recomputing": True},  # torch.compile
    "torchtitan": {"stops_recomputing": True},
}
"""What a source's program does differently from the named one, by the prefix of the source's name."""
ARCH_POSITIONS: Mapping[str, PositionEmbedding] = {"llama": "rope", "relu2": "rope"}
ARCH_ACTIVATIONS: Mapping[str, Activation] = {"llama": "swiglu", "relu2": "squared_relu"}
SELECTIVE_OP: tuple[Module, ...] = ("layernorm", "mlp_act", "core_attn")
"""The nearest equivalent of saving the outputs of every other operator."""


@dataclass(frozen=True, eq=False)
class Published:
    """A published run and its results.

    Attributes:
        seconds: seconds per iteration; None if they were not published.
        memory_gb: memory of the largest rank; None if it was not published.
        is_theoretical: whether the memory was computed, for tensors only, rather than measured.
        ran_out_of_memory: whether the run failed for lack of memory.
    """

    name: str
    source: str
    planned_run: OtherRun
    parameters_b: float
    seconds: float | None
    memory_gb: float | None
    is_theoretical: bool
    ran_out_of_memory: bool


def read_published(path: Path) -> Iterator[Published]:
    """Yield the runs of a file, in its order."""
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            yield _published(row)


def _published(row: Mapping[str, str]) -> Published:
    return Published(
        row["case_id"],
        row["source"],
        planned_run_of(row),
        float(row["params_b_calc"]),
        _number(row["iter_time_s"]),
        _number(row["mem_gb"]),
        "theoretical" in row["mem_kind"],
        not row["iter_time_s"] and "(OOM" in row["notes"],
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def planned_run_of(row: Mapping[str, str]) -> OtherRun:
    """Return the model, layout and cluster of a row as a planned run."""
    gpu = find_gpu(row["gpu"])
    cp = int(row["cp"] or 1)
    usual = next((gbps for name, gbps in OTHER_NETWORKS.items() if name in row["source"]), gpu.network_gbps)
    network = _number(row.get("network_gbps", "")) or usual
    cluster = Cluster(gpu, int(row["n_gpus"]), int(row["gpus_per_node"]), gpu.node_gbps, network)
    config = _config(row)
    config = replace(config, parallel=replace(config.parallel, context_parallel_size=cp))
    return other_run(program_of(row), config, cluster)


def program_name_of(row: Mapping[str, str]) -> str:
    """Return the name of the program that is most similar to that of a row's source."""
    if row["zero"] == "3" and row["source"].startswith("Narayanan"):  # its baseline: DeepSpeed, early in 2021
        return "deepspeed-2021"
    return _by_source(row, PROGRAM_NAMES, "plain-torch")


def program_of(row: Mapping[str, str]) -> OtherProgram:
    """Return the program of a row's source."""
    program = replace(PROGRAMS[program_name_of(row)], **_by_source(row, CHANGES, {}))
    if row["case_id"].endswith("_compile"):
        program = replace(program, fused_elementwise=True)
    if row["zero"] == "0" and "autotuning" in row["source"]:  # torch's AMP: gradients in fp32
        program = replace(program, gradient_bytes=4, shared_copy_bytes=0)
    return in_dtype(program, row["dtype"])


def _by_source(row: Mapping[str, str], table: Mapping[str, Any], default: Any) -> Any:
    """Return the entry of a table whose key is a prefix of the row's source."""
    return next((found for prefix, found in table.items() if row["source"].startswith(prefix)), default)


def _config(row: Mapping[str, str]) -> Config:
    micro = int(row["mbs"] or 4)
    dp = int(row["dp"])
    parallel = ParallelConfig(
        tensor_model_parallel_size=int(row["tp"]),
        pipeline_model_parallel_size=int(row["pp"]),
        data_parallel_size=dp,
        sequence_parallel=row["sp"] == "1" and row["tp"] != "1",
        zero_stage=int(row["zero"]),
        overlap_grad_reduce=program_of(row).kernels.attention != "unfused",
        num_virtual_stages_per_pipeline_rank=_chunks(row),
        pipeline_layers=split_by_cost(row) if row["source"].startswith("nanotron") else None,
    )
    config = Config(
        model=_model(row),
        parallel=parallel,
        recompute=_recompute(row["recompute"]),
        training=TrainingConfig(
            micro_batch_size=micro, global_batch_size=int(row["gbs"] or micro * dp), train_iters=1
        ),
    )
    return with_even_stages(config)


def split_by_cost(row: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the layers of each stage as nanotron splits them; None with one stage.

    A stage gets layers, and the last one the head, until the sum of their weights is above its share
    (nanotron, src/nanotron/models/base.py, build_model).
    """
    stages, layers, hidden = int(row["pp"]), int(row["layers"]), int(row["hidden"])
    if stages == 1:
        return None
    layer = 4 * hidden**2 + 3 * int(row["ffn"]) * hidden
    share = (layers * layer + int(row["vocab"]) * hidden) / stages
    counts = [0] * stages
    stage = 0
    for number in range(1, layers + 1):
        counts[stage] += 1
        stage += number * layer > (stage + 1) * share
    return tuple(counts)


def _chunks(row: Mapping[str, str]) -> int | None:
    """Return the listed chunks per rank; for interleaved runs without a number, chunks of two layers."""
    if row["vpp"] or "interleaved 1F1B used" not in row["notes"]:
        return int(row["vpp"]) if row["vpp"] else None
    return -(-int(row["layers"]) // (2 * int(row["pp"])))


def _model(row: Mapping[str, str]) -> ModelConfig:
    arch = row["arch"]
    is_llama, is_bloom = arch == "llama", row["source"].startswith("BigScience")
    return ModelConfig(
        num_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        ffn_hidden_size=int(row["ffn"]),
        num_attention_heads=int(row["heads"]),
        num_query_groups=int(row["kv_groups"]),
        seq_length=int(row["seq"]),
        vocab_size=int(row["vocab"]),
        pad_vocab_size_to=int(row["vocab"]),
        position_embedding_type="alibi" if is_bloom else ARCH_POSITIONS.get(arch, "learned_absolute"),
        embed_layernorm=is_bloom,
        normalization="RMSNorm" if is_llama else "LayerNorm",
        activation=ARCH_ACTIVATIONS.get(arch, "gelu"),
        add_bias_linear=arch == "gpt",
        hidden_dropout=ModelConfig.hidden_dropout if arch == "gpt" else 0.0,
        untie_embeddings_and_output_weights=row["tied"] == "0",
        params_dtype=row["dtype"],  # type: ignore[arg-type]
    )


def _recompute(text: str) -> RecomputeConfig:
    if text == "full":
        return RecomputeConfig(recompute_granularity="full")
    if text == "selective":
        return RecomputeConfig(recompute_granularity="selective")
    if text == "selective_op":
        return RecomputeConfig(recompute_granularity="selective", recompute_modules=SELECTIVE_OP)
    return RecomputeConfig()
