"""Stages 3 and 8: the training step by the programs of benchmarks/, and its kernels by PyTorch's profiler."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from benchmarks.gpu_check.ceilings import data_sheet, one_rank
from benchmarks.gpu_check.commands import Finished, run_python
from benchmarks.gpu_check.results import Result, duration, failed, info, passed, rate, skipped
from benchmarks.gpu_check.runner import ROOT, CheckContext
from benchmarks.gpu_check.watch import watched
from benchmarks.roofline import predicted_mfu, rows, step_seconds
from megalite.config.presets import PRESETS

TINY = ("--model", "small", "--layers", "1", "--hidden", "64", "--seq-length", "32", "--vocab-size", "128")
COLUMNS = (
    "dropout",
    "tok/s",
    "plain tok/s",
    "ratio",
    "by CPU",
    "TFLOP/s",
    "product",
    "of it",
    "MFU",
    "GB",
    "plain GB",
)
"""Columns of a row that benchmarks/train_step.py prints."""


def train_step_row(text: str) -> dict[str, str] | None:
    """Return the cells of the last row of benchmarks/train_step.py; None if it printed none."""
    found = re.findall(r"^ +(0\.\d +.*)$", text, flags=re.MULTILINE)
    cells = found[-1].split() if found else []
    return dict(zip(COLUMNS, cells, strict=True)) if len(cells) == len(COLUMNS) else None


def _train_step(context: CheckContext, name: str, *flags: str) -> Iterator[Result]:
    """Run benchmarks/train_step.py and report its row; of GPT-1.3B with the expected MFU."""
    model = TINY if context.is_small else flags[:2]
    rounds = ("--rounds", "2", "--no-plain") if context.is_small else ()
    with watched(context.device) as watch:
        done = run_python("benchmarks/train_step.py", *model, *flags[2:], *rounds)
    cells = train_step_row(done.text)
    if cells is None:
        is_too_large = "GB by the plan, and" in done.reason
        yield skipped(name, done.reason) if is_too_large else failed(name, done.reason)
        return
    num_microbatches, size = map(int, re.findall(r"(\d+) microbatch\(es\) of (\d+)", done.text)[0])
    batch = f"{num_microbatches} x {size} samples, {watch.summary()}"
    gpu = data_sheet(context)
    if cells["MFU"] != "-":
        expected = None
        if gpu is not None and "gpt-1.3b" in flags:
            expected = 100 * predicted_mfu(PRESETS["gpt-1.3b"], size, gpu, num_microbatches)
        yield rate(f"{name}: MFU", float(cells["MFU"].rstrip("%")), expected, "%", 0.95, batch)
    else:
        yield info(f"{name}: share of a GEMM", cells["of it"], detail=batch)
    yield info(f"{name}: tokens/s", float(cells["tok/s"]))
    yield info(f"{name}: TFLOP/s", float(cells["TFLOP/s"]), detail=f"one large GEMM {cells['product']}")
    yield info(f"{name}: memory", float(cells["GB"]), "GB")
    if cells["ratio"] != "-":
        yield rate(f"{name}: times as fast as plain PyTorch", float(cells["ratio"]), 1.0, "", 1.0)
    yield from _left_out(name, done)


def _left_out(name: str, done: Finished) -> Iterator[Result]:
    for what, reason in re.findall(r"^(.+) is skipped: (.*)$", done.text, flags=re.MULTILINE):
        yield skipped(f"{name}: {what}", reason)


def step_1(context: CheckContext) -> Iterator[Result]:
    """Measure GPT-1.3B's step of one microbatch, with the clock and power of the run."""
    yield from _train_step(
        context, "gpt-1.3b", "--model", "gpt-1.3b", "--rounds", "15", "--microbatches", "1"
    )


def step_8(context: CheckContext) -> Iterator[Result]:
    """Measure GPT-1.3B's step of eight microbatches."""
    flags = ("--model", "gpt-1.3b", "--rounds", "6", "--microbatches", "8", "--no-plain")
    yield from _train_step(context, "gpt-1.3b, 8 microbatches", *flags)


def step_7b(context: CheckContext) -> Iterator[Result]:
    """Measure GPT-7B's step; it needs 140 GB."""
    yield from _train_step(context, "gpt-7b", "--model", "gpt-7b", "--rounds", "8", "--no-plain")


def step_bloom(context: CheckContext) -> Iterator[Result]:
    """Measure one of 8 tensor-parallel ranks of a BLOOM of 20 billion parameters, without communication."""
    flags = ("--model", "bloom-20b-slice", "--rounds", "8", "--no-plain")
    yield from _train_step(context, "bloom-20b-slice", *flags)


def peer_plain(context: CheckContext) -> Iterator[Result]:
    """Compare GPT-1.3B's step with plain PyTorch."""
    yield from _peer(context, "plain")


def peer_compiled(context: CheckContext) -> Iterator[Result]:
    """Compare GPT-1.3B's step with plain PyTorch under torch.compile."""
    yield from _peer(context, "compiled")


def peer_transformers(context: CheckContext) -> Iterator[Result]:
    """Compare GPT-1.3B's step with Hugging Face's model."""
    yield from _peer(context, "transformers")


def peer_megatron(context: CheckContext) -> Iterator[Result]:
    """Compare GPT-1.3B's step with megatron-core."""
    yield from _peer(context, "megatron")


def compile_peers(context: CheckContext) -> Iterator[Result]:
    """Compile what the peers compile: the caches of torch.compile and Triton are on disk."""
    done = _run_peer(context, "compiled", "1")
    detail = done.reason if done.status else ""
    yield passed("compile peers", not done.status, f"status {done.status}", "status 0", detail)


def _run_peer(context: CheckContext, peer: str, rounds: str) -> Finished:
    model = TINY if context.is_small else ("--model", "gpt-1.3b", "--micro-batch-size", "4")
    return run_python("benchmarks/peers.py", *model, "--rounds", rounds, "--peers", peer)


def _peer(context: CheckContext, peer: str) -> Iterator[Result]:
    done = _run_peer(context, peer, "2" if context.is_small else "5")
    for ratio in re.findall(rf"^{peer} +\d+ +([\d.]+) ", done.text, flags=re.MULTILINE):
        yield rate(f"times as fast as {peer}", float(ratio), 1.0, "", 1.0)
    yield from _left_out("peers", done)
    if done.status:
        yield failed(f"peers, {peer}", done.reason)


KINDS = {
    "attention": (
        *("flash", "fmha", "sdpa", "cudnn_generated"),
        *("delta_kernel", "key_gradients_kernel", "query_gradients_kernel"),
    ),
    "gemm": ("gemm", "cutlass", "nvjet", "cublas", "wgmma", "xmma", "addmm", "aten::mm"),
}
"""Words in the names of kernels, by kind; all others count as memory-bound."""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, as the roofline's rows have it, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "memory")


def profile(context: CheckContext) -> Iterator[Result]:
    """Profile GPT-1.3B's step: its kernels by kind against the roofline; the log has the table of kernels."""
    from torch.profiler import ProfilerActivity

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from train_step import Machine, config_that_fits, parse_arguments

    from megalite.train.trainer import start_trainer

    arguments: Sequence[str] = TINY if context.is_small else ("--model", "gpt-1.3b")
    args = parse_arguments([*arguments, "--params-dtype", "bf16"])
    is_cuda, num_steps = context.device == "cuda", 3
    config = config_that_fits(args, 0.0, Machine.here())
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with one_rank(context) as topology, start_trainer(config, topology) as trainer:
        for _ in range(4):
            trainer.step()
        start = time.monotonic()
        for _ in range(num_steps):
            trainer.step()
        seconds = (time.monotonic() - start) / num_steps
        size, gpu = config.training.micro_batch_size, data_sheet(context)
        table = list(rows(config.model, size, gpu)) if gpu and not context.is_small else []
        expected = step_seconds(table) * 1e3 if table else None
        yield duration("step without profiler", seconds * 1e3, expected, "ms", 0.95, f"micro-batch {size}")
        with torch.profiler.profile(activities=[activity]) as found:
            for _ in range(num_steps):
                trainer.step()
    averages = found.key_averages()
    print(averages.table(sort_by=f"self_{'cuda' if is_cuda else 'cpu'}_time_total", row_limit=60))
    events = [event for event in averages if (event.device_type == DeviceType.CUDA) == is_cuda]

    def time_of(event: FunctionEventAvg) -> float:
        return event.self_device_time_total if is_cuda else event.self_cpu_time_total

    if not events:
        yield failed("profile", "no kernel in the trace: may this process use the profiler (CUPTI)?")
        return
    busy = 0.0
    for kind in ("gemm", "attention", "memory"):
        taken = sum(time_of(event) for event in events if kind_of(event.key) == kind) / 1e6 / num_steps
        busy += taken
        expected = step_seconds(table, kind) * 1e3 if table else None
        yield duration(f"step's kernels: {kind}", taken * 1e3, expected, "ms", 0.9)
    yield info("step, GPU idle", (seconds - busy) * 1e3, "ms", "step minus the time of its kernels")
    for event in sorted(events, key=time_of, reverse=True)[:12]:
        shown = f"{event.count / num_steps:.0f} calls a step, {kind_of(event.key)}"
        yield info(f"kernel {event.key[:60]}", time_of(event) / 1e3 / num_steps, "ms", shown)
