#!/usr/bin/env python
"""Compare `tools/plan.py` with published runs when it only gets the runs' flags.

PYTHONPATH=. python benchmarks/planner_flags.py [--cases FILE.csv]

benchmarks/planner.py knows besides which program each run was of, and on which network. Here every line is
what somebody types: model, layout, batch, precision, recomputation, ZeRO stage and, before FlashAttention,
the attention backend, of this program's own run.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.planner import CASES, Comparison, lines
from megalite.plan.estimate import RunPlan
from megalite.plan.plan_request import read_request
from megalite.plan.published_runs import program_of, read_published

SIZES = {
    "n_gpus": "world-size",
    "gpus_per_node": "gpus-per-node",
    "layers": "num-layers",
    "hidden": "hidden-size",
    "ffn": "ffn-hidden-size",
    "heads": "num-attention-heads",
    "seq": "seq-length",
    "vocab": "padded-vocab-size",
    "tp": "tp",
    "pp": "pp",
    "zero": "zero-stage",
    "vpp": "num-virtual-stages-per-pipeline-rank",
    "cp": "context-parallel-size",
}
"""Columns that are a flag's value."""
MODELS = {
    "gpt": "",
    "mpt": "--disable-bias-linear",
    "llama": "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear",
    "relu2": "--activation relu --position-embedding-type rope --disable-bias-linear",
}
RECOMPUTATIONS = {
    "none": "",
    "unstated": "",
    "full": "--recompute-granularity full",
    "selective": "--recompute-granularity selective",
    "selective_op": "--recompute-granularity selective --recompute-modules core_attn mlp_act layernorm",
}


def flags_of(row: Mapping[str, str]) -> Iterator[str]:
    """Yield the words behind `python tools/plan.py`; a micro-batch that was not published is 4."""
    micro = int(row["mbs"] or 4)
    yield from ("--gpu", row["gpu"])
    yield from ("--micro-batch-size", str(micro))
    yield from ("--global-batch-size", row["gbs"] or str(micro * int(row["dp"])))
    for column, flag in SIZES.items():
        if row[column]:
            yield from (f"--{flag}", row[column])
    if row["kv_groups"] != row["heads"]:
        yield from ("--num-query-groups", row["kv_groups"])
    if row["dtype"] != "fp32":
        yield f"--{row['dtype']}"
    if row["tied"] == "0":
        yield "--untie-embeddings-and-output-weights"
    if row["sp"] == "1" and row["tp"] != "1":
        yield "--sequence-parallel"
    if row["source"].startswith("BigScience"):
        yield from ("--position-embedding-type", "alibi", "--embed-layernorm")
    yield from MODELS[row["arch"]].split()
    yield from RECOMPUTATIONS[row["recompute"]].split()
    if not program_of(row).fused_attention:
        yield from ("--attention-backend", "unfused")


def compare(cases: Path) -> list[Comparison]:
    """Plan every run of a file by its flags."""
    with cases.open(newline="", encoding="utf-8") as file:
        plans = [RunPlan(read_request(list(flags_of(row))).planned_run()) for row in csv.DictReader(file)]
    return [Comparison(run, plan) for run, plan in zip(read_published(cases), plans, strict=True)]


def main() -> None:
    """Read the flags and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, default=CASES)
    print("\n".join(lines(compare(parser.parse_args().cases))))


if __name__ == "__main__":
    main()
