"""Read published runs from the lines of a CSV file, as planned runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config import Config, ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.config.model import Activation, PositionEmbedding
from megalite.config.recompute import Module
from megalite.hardware.gpus import find_gpu
from megalite.plan.layout_fields import with_even_stages
from megalite.plan.planned_run import PROGRAMS, Cluster, PlannedRun, Program, in_dtype

OTHER_NETWORKS = {"BigScience": 1.58, "DeepSpeed": 1.6}
"""Gigabytes per second from a GPU to other nodes, in sources with unusual nodes.

Jean Zay's nodes have four adapters of 100 Gb/s, but do not reach that: an all-reduce over four of the A100
nodes had 40.5 Gb/s (bigscience-workshop/bigscience, experiments/bandwidth/README.md, early in 2022). If this
is a node's bandwidth, each of its GPUs has 0.63 GB/s; if it is one adapter's, each has 2.53 GB/s. The value
is their geometric mean, over `link_share`. The nodes were repaired on 25 February 2022, during these runs.

The 16 V100s of the autotuner's table have one adapter of 100 Gb/s for eight GPUs."""
_MODERN = PROGRAMS["plain-torch"]
PROGRAM_OF: Mapping[str, Program] = {
    "Megatron-LM README Sep": PROGRAMS["megatron-2021"],
    "Megatron-LM README H100": PROGRAMS["megatron-core"],
    "Narayanan": PROGRAMS["megatron-2021"],
    "Korthikanti": replace(PROGRAMS["megatron-2021"], tp_hidden_share=0.5, fused_accumulation=True),
    "Megatron-Turing": PROGRAMS["megatron-2021"],
    "BigScience": PROGRAMS["megatron-deepspeed"],
    "Azure ML guide": replace(PROGRAMS["megatron-deepspeed"], fused_elementwise=False, buffer_bytes=1e9),
    "NVIDIA DGX": PROGRAMS["megatron-core"],
    "karpathy": replace(_MODERN, cudnn_attention=True, fused_elementwise=True),
    "Llama-3": PROGRAMS["megatron-core"],
    "nanotron": replace(_MODERN, keeps_gathered=True, copies_slices=True),
}
"""Programs, by the prefix of the source's name. Other sources run programs with torch's fused attention."""
ARCH_POSITIONS: Mapping[str, PositionEmbedding] = {"llama": "rope", "relu2": "rope"}
ARCH_ACTIVATIONS: Mapping[str, Activation] = {"llama": "swiglu", "relu2": "relu"}
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
    planned_run: PlannedRun
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


def planned_run_of(row: Mapping[str, str]) -> PlannedRun:
    """Return the model, layout and cluster of a row as a planned run."""
    gpu = find_gpu(row["gpu"])
    cp = int(row["cp"] or 1)
    usual = next((gbps for name, gbps in OTHER_NETWORKS.items() if name in row["source"]), gpu.network_gbps)
    network = _number(row.get("network_gbps", "")) or usual
    cluster = Cluster(gpu, int(row["n_gpus"]), int(row["gpus_per_node"]), gpu.node_gbps, network)
    return PlannedRun(_config(row), cluster, program_of(row), cp)


def program_of(row: Mapping[str, str]) -> Program:
    """Return the program of a row's source."""
    if row["zero"] == "3" and row["source"].startswith("Narayanan"):  # its baseline: DeepSpeed, early in 2021
        return in_dtype(PROGRAMS["deepspeed-2021"], row["dtype"])
    found = (program for source, program in PROGRAM_OF.items() if row["source"].startswith(source))
    program = next(found, _MODERN)
    if row["zero"] == "0" and "autotuning" in row["source"]:  # torch's AMP: gradients in fp32
        program = replace(program, gradient_bytes=4, shared_copy_bytes=0)
    return in_dtype(program, row["dtype"])


def _config(row: Mapping[str, str]) -> Config:
    micro = int(row["mbs"] or 4)
    dp = int(row["dp"])
    parallel = ParallelConfig(
        tensor_model_parallel_size=int(row["tp"]),
        pipeline_model_parallel_size=int(row["pp"]),
        data_parallel_size=dp,
        sequence_parallel=row["sp"] == "1" and row["tp"] != "1",
        zero_stage=int(row["zero"]),
        overlap_grad_reduce=program_of(row).fused_attention,
        num_virtual_stages_per_pipeline_rank=_chunks(row),
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
