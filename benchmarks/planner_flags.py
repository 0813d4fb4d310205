#!/usr/bin/env python
"""Compare `tools/plan.py` with published runs when it only gets the runs' flags.

PYTHONPATH=. python benchmarks/planner_flags.py [--cases FILE.csv] [--named]

benchmarks/planner.py also knows on which network each run was, and what its program did differently from the
ones that tools/plan.py knows. Here every line is what somebody types: model, layout, batch, precision,
recomputation, ZeRO stage and, before FlashAttention, the attention backend.

Without --named, a line plans megalite's own run. megalite's kernels move fewer bytes than those of the
published programs, so most plans are shorter than the runs. Two other savings are left out: overlap of
tensor-parallel collectives in forward, and recomputation that ends before a layer's last GEMM. With --named,
a line is planned as the program of its source (benchmarks/other_programs.py).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.other_programs import program_named, request_of
from benchmarks.planner import CASES, Comparison, lines
from benchmarks.published_runs import program_name_of, program_of, read_published
from megalite.plan.estimate import RunPlan
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import PlannedRun

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
    "mpt": "--disable-bias-linear --hidden-dropout 0",
    "llama": "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--hidden-dropout 0",
    "relu2": "--activation relu --position-embedding-type rope --disable-bias-linear --hidden-dropout 0",
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
    if row["tp"] != "1":
        yield "--no-tp-comm-overlap"
        yield from ("--sequence-parallel",) * (row["sp"] == "1")
    if row["source"].startswith("BigScience"):
        yield from ("--position-embedding-type", "alibi", "--embed-layernorm")
    yield from MODELS[row["arch"]].split()
    yield from RECOMPUTATIONS[row["recompute"]].split()
    if program_of(row).kernels.attention == "unfused":
        yield from ("--attention-backend", "unfused")


def compare(cases: Path, *, named: bool = False) -> list[Comparison]:
    """Plan every run of a file by its flags."""
    with cases.open(newline="", encoding="utf-8") as file:
        plans = [plan_of(row, named=named) for row in csv.DictReader(file)]
    return [Comparison(run, plan) for run, plan in zip(read_published(cases), plans, strict=True)]


def plan_of(row: Mapping[str, str], *, named: bool = False) -> RunPlan:
    """Plan a run that recomputes whole layers.

    Args:
        named: plan the program of the row's source instead of megalite.
    """
    if named:
        return request_of(program_named(program_name_of(row)), list(flags_of(row)))[1]
    run = read_request(list(flags_of(row))).planned_run()
    return RunPlan(WholeRecomputation(run.config, run.cluster))


class WholeRecomputation(PlannedRun):
    """Run that recomputes layers to the end."""

    stops_recomputing = False


def main() -> None:
    """Read the flags and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--named", action="store_true", help="plan the program of each source")
    args = parser.parse_args()
    print("\n".join(lines(compare(args.cases, named=args.named))))


if __name__ == "__main__":
    main()
