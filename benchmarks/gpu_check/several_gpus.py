"""Stage 5, with more than one GPU: bandwidth of all-reduce, and the same run in any layout over NCCL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import torch

from benchmarks.gpu_check.ceilings import data_sheet
from benchmarks.gpu_check.commands import run_python
from benchmarks.gpu_check.faults import MODEL, SMALL_MODEL, losses_of
from benchmarks.gpu_check.links import LOG_SETTINGS, parse_log
from benchmarks.gpu_check.results import Result, at_most, failed, info, passed, rate, skipped
from benchmarks.gpu_check.runner import CheckContext
from megalite.verify.layouts import TABLE, Layout

ROUNDING = 2e-3
"""Limit for a bf16 loss: the effect of the order of sums in a few iterations."""


def num_ranks(context: CheckContext) -> int:
    """Return the ranks that this machine can run: one per GPU."""
    return 2 if context.device == "cpu" else torch.cuda.device_count()


def _too_few(context: CheckContext, name: str) -> Iterator[Result]:
    yield skipped(name, f"this machine has {num_ranks(context)} GPU")


def all_reduce(context: CheckContext) -> Iterator[Result]:
    """Report NCCL's links and the bus bandwidth of all-reduce: 2 (n - 1) / n bytes per byte and second."""
    if num_ranks(context) < 2:
        yield from _too_few(context, "all-reduce")
        return
    ranks = str(num_ranks(context))
    options = ["small"] if context.is_small else []
    done = run_python(
        *("-m", "torch.distributed.run", "--nproc-per-node", ranks, "-m", "benchmarks.gpu_check.all_reduce"),
        *(context.device, *options),
        env=LOG_SETTINGS,
    )
    if context.device == "cuda":
        links = parse_log(done.text)
        yield info("links", links.summary, detail="; ".join(links.advice))
    gpu = data_sheet(context)
    measured = [json.loads(line) for line in re.findall(r"^\{.*\}$", done.text, flags=re.MULTILINE)]
    for each in measured:
        is_largest = each is measured[-1]
        expected = gpu.node_gbps * gpu.link_share if gpu and is_largest else None
        name = f"all-reduce of {each['megabytes']:g} MB on {ranks} ranks"
        yield rate(name, each["bus_gbps"], expected, "GB/s", 0.9)
    if done.status:
        yield failed("all-reduce", done.reason)


def layouts(context: CheckContext) -> Iterator[Result]:
    """Compare the layouts of the layout table that fit these GPUs with one GPU, in fp64."""
    if num_ranks(context) < 2:
        yield from _too_few(context, "layout table")
        return
    names = [name for name in TABLE if Layout.parse(name).world_size <= num_ranks(context)]
    names = ["tp2", "pp2"] if context.is_small else names
    backend = "gloo" if context.device == "cpu" else "nccl"
    done = run_python(
        *("tools/verify_layout.py", "--layouts", ",".join(names), "--iterations", "5"),
        *("--preset", "gpt-tiny", "--vocab-size", "512", "--params-dtype", "fp64", "--mock-data"),
        *("--global-batch-size", "8", "--lr", "3e-3", "--distributed-backend", backend),
    )
    for name in names:
        row = re.search(
            rf"^{re.escape(str(Layout.parse(name)))} +\d+ +(\S+) .* (the same run|\S+ differs.*)$",
            done.text,
            re.M,
        )
        is_same = row is not None and row[2] == "the same run"
        yield passed(
            f"layout {name} over {backend}",
            is_same,
            row[1] if row else "-",
            "1e-11",
            row[2] if row else done.reason,
        )


def runs(context: CheckContext) -> Iterator[Result]:
    """Train with tp 2, pp 2 and dp 2, started by torchrun, and compare losses with one GPU's."""
    if num_ranks(context) < 2:
        yield from _too_few(context, "runs on 2 GPUs")
        return
    launches = {"one": (1, ()), "tp 2": (2, ("--tp", "2")), "pp 2": (2, ("--pp", "2")), "dp 2": (2, ())}
    found = {}
    for name, (ranks, flags) in launches.items():
        folder = context.scratch / name.replace(" ", "")
        done = run_python(
            *("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "pretrain_gpt.py", *flags),
            *(SMALL_MODEL if context.is_small else MODEL),
            *("--bf16", "--mock-data", "--train-iters", "10", "--lr", "1e-4", "--eval-iters", "0"),
            *("--log-interval", "1", "--metrics-file", str(folder / "metrics.jsonl")),
            *("--attention-dropout", "0", "--hidden-dropout", "0.1"),
            *(("--distributed-backend", "gloo") if context.device == "cpu" else ()),
        )
        found[name] = losses_of(folder)
        if done.status or not found[name]:
            yield failed(f"run with {name}", done.reason)
        elif name == "one":
            yield info("run on one rank, last loss", found["one"][max(found["one"])])
        elif found.get("one"):
            worst = max(abs(found[name][i] - loss) / loss for i, loss in found["one"].items())
            yield at_most(f"run with {name}, losses", worst, ROUNDING)
