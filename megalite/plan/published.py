"""Published runs, a line each of a CSV file, as jobs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config import Config, ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.config.model import Activation, PositionEmbedding
from megalite.config.recompute import Module
from megalite.plan.cluster import Cluster
from megalite.plan.gpu import find_gpu
from megalite.plan.job import Job
from megalite.plan.layout import with_even_stages
from megalite.plan.program import PROGRAMS, Program, in_dtype

OTHER_NETWORKS = {"BigScience": 1.58, "DeepSpeed": 1.6}
"""Gigabytes a second and GPU of sources whose nodes are not the usual ones.

Jean Zay's nodes have four adapters of 100 Gb/s, which do not reach that: an all-reduce over four of the A100
nodes got 40.5 Gb/s (bigscience-workshop/bigscience, experiments/bandwidth/README.md, early in 2022). If that
is what a node has, its GPUs have 0.63 GB/s each; if it is what one adapter has, 2.53 GB/s. This is their
geometric mean, over `link_share`. The nodes were mended on 25 February 2022, amid the published runs.

The 16 V100s of the autotuner's table have one adapter of 100 Gb/s for eight GPUs."""
_MODERN = PROGRAMS["plain-torch"]
PROGRAM_OF: Mapping[str, Program] = {
    "Megatron-LM README Sep": PROGRAMS["megatron-2021"],
    "Megatron-LM README H100": PROGRAMS["megatron-core"],
    "Narayanan": PROGRAMS["megatron-2021"],
    "Korthikanti": replace(PROGRAMS["megatron-2021"], tp_hidden_share=0.5, fused_accumulation=True),
    "Megatron-Turing": PROGRAMS["megatron-2021"],
    "BigScience": PROGRAMS["megatron-deepspeed"],
    "Azure ML guide": replace(PROGRAMS["megatron-deepspeed"], fused_passes=False, buffer_bytes=1e9),
    "NVIDIA DGX": PROGRAMS["megatron-core"],
    "karpathy": replace(_MODERN, cudnn_attention=True, fused_passes=True),
    "Llama-3": PROGRAMS["megatron-core"],
    "nanotron": replace(_MODERN, keeps_gathered=True, copies_slices=True),
}
"""By how a source's name begins; others run one of the time of fused attention."""
POSITIONS: Mapping[str, PositionEmbedding] = {"llama": "rope", "relu2": "rope"}
ACTIVATIONS: Mapping[str, Activation] = {"llama": "swiglu", "relu2": "relu"}
SELECTIVE_OP: tuple[Module, ...] = ("layernorm", "mlp_act", "core_attn")
"""The nearest that there is here to keeping the outputs of every other operator."""


@dataclass(frozen=True, eq=False)
class Published:
    """A run and what was said of it.

    Attributes:
        seconds: of an iteration; None where none was published.
        memory_gb: of its largest rank.
        is_theoretical: the memory was worked out, of tensors alone; otherwise it was measured.
        ran_out_of_memory: it did not run.
    """

    name: str
    source: str
    job: Job
    parameters_b: float
    seconds: float | None
    memory_gb: float | None
    is_theoretical: bool
    ran_out_of_memory: bool


def read_published(path: Path) -> Iterator[Published]:
    """The runs of a file, in its order."""
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            yield _published(row)


def _published(row: Mapping[str, str]) -> Published:
    return Published(
        row["case_id"],
        row["source"],
        job_of(row),
        float(row["params_b_calc"]),
        _number(row["iter_time_s"]),
        _number(row["mem_gb"]),
        "theoretical" in row["mem_kind"],
        not row["iter_time_s"] and "(OOM" in row["notes"],
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def job_of(row: Mapping[str, str]) -> Job:
    """The line's model, layout and cluster."""
    gpu = find_gpu(row["gpu"])
    cp = int(row["cp"] or 1)
    usual = next((gbps for word, gbps in OTHER_NETWORKS.items() if word in row["source"]), gpu.network_gbps)
    network = _number(row.get("network_gbps", "")) or usual
    cluster = Cluster(gpu, int(row["n_gpus"]), int(row["gpus_per_node"]), gpu.node_gbps, network)
    return Job(_config(row), cluster, program_of(row), cp)


def program_of(row: Mapping[str, str]) -> Program:
    """The source's."""
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
    """As listed; two layers in each where they are said to be interleaved and no number is."""
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
        position_embedding_type="alibi" if is_bloom else POSITIONS.get(arch, "learned_absolute"),
        embed_layernorm=is_bloom,
        normalization="RMSNorm" if is_llama else "LayerNorm",
        activation=ACTIVATIONS.get(arch, "gelu"),
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
