"""Stage 5: several ranks over NCCL, one on each GPU, or all on the one GPU of the machine."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_check.ceilings import data_sheet
from benchmarks.gpu_check.commands import Finished, run_python
from benchmarks.gpu_check.faults import MODEL, SMALL_MODEL, losses_of
from benchmarks.gpu_check.links import LOG_SETTINGS, parse_log
from benchmarks.gpu_check.mps import Mps
from benchmarks.gpu_check.results import Result, at_most, failed, info, passed, rate, skipped
from benchmarks.gpu_check.runner import ROOT, CheckContext
from megalite.observe.verify.layouts import Layout

MAX_RANKS = 8
"""Most ranks of a layout of the layout table, and most ranks that share a GPU."""
ROUNDING = 2e-3
"""Limit for a bf16 loss: the effect of the order of sums in a few iterations."""
RESUMED = 1e-11
"""Limit for a loss in fp64 after a resume in another layout."""
RankCheck = Callable[[CheckContext, "RankHost"], Iterator[Result]]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SECONDS_TO_TRAIN, SECONDS_TO_END_RANKS = 60.0, 60.0


@dataclass(frozen=True)
class RankHost:
    """The ranks that this machine can run.

    Attributes:
        num_ranks: most ranks of a run.
        description: where the ranks run, for the results.
        on_gpus: the ranks use GPUs and NCCL, not CPU cores and gloo.
        mps: the daemon for ranks that share a GPU; None if each has its own.
    """

    num_ranks: int
    description: str
    on_gpus: bool = True
    mps: Mps | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of a training run on these ranks."""
        if not self.on_gpus:
            return "--distributed-backend", "gloo", "--num-threads", "1"
        return () if self.mps is None else ("--ranks-share-gpus",)

    @property
    def row_seconds(self) -> float:
        """Return the time limit of a run of few iterations: longer if ranks take turns on a GPU."""
        return 180.0 if self.mps is not None and self.mps.problem else 60.0

    def fits(self, layout: str) -> bool:
        """Return whether this machine has the ranks of a layout."""
        return Layout.parse(layout).world_size <= self.num_ranks

    def killed(self) -> None:
        """Let programs start on the GPU again after a rank was killed."""
        if self.mps is not None:
            self.mps.restart()


@contextmanager
def rank_host(context: CheckContext) -> Iterator[RankHost | str]:
    """Prepare the environment of programs that run several ranks; yield why there cannot be several.

    On a machine with one GPU, ranks share it, with the context's NCCL preloaded, and under MPS if it starts.
    """
    if context.device == "cpu":
        yield RankHost(4, "gloo on CPU cores", on_gpus=False)
        return
    count = torch.cuda.device_count()
    if count > 1:
        yield RankHost(min(count, MAX_RANKS), f"a rank on each of {count} GPUs")
        return
    if context.nccl is not None:
        os.environ["LD_PRELOAD"] = str(context.nccl.resolve())
    names = "from megalite.utils.hardware.process_settings import loaded_nccl, nccl_problem"
    question = f"{names}; print(loaded_nccl(), nccl_problem(), sep='|')"
    answer = run_python("-c", question).text.strip().splitlines()[-1]
    version, _, problem = answer.partition("|")
    if problem:
        yield f"one GPU: {problem}, or pass --nccl FILE"
        return
    with Mps() as mps:
        how = f"in turns ({mps.problem})" if mps.problem else "under MPS"
        words = f"{MAX_RANKS} ranks share one GPU {how}, NCCL {version.strip('()').replace(', ', '.')}"
        yield RankHost(MAX_RANKS, words, mps=mps)


def on_several_ranks(name: str) -> Callable[[RankCheck], Callable[[CheckContext], Iterator[Result]]]:
    """Make a check of a function that needs several ranks, which is skipped where there cannot be several."""

    def check_of(function: RankCheck) -> Callable[[CheckContext], Iterator[Result]]:
        @functools.wraps(function)
        def check(context: CheckContext) -> Iterator[Result]:
            with rank_host(context) as host:
                if isinstance(host, str):
                    yield skipped(name, host)
                else:
                    yield from function(context, host)

        return check

    return check_of


@on_several_ranks("all-reduce")
def all_reduce(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Report NCCL's links and the bus bandwidth of all-reduce: 2 (n - 1) / n bytes per byte and second."""
    yield info("ranks", float(host.num_ranks), detail=host.description)
    shares = host.mps is not None
    options = [*(["small"] if context.is_small else []), *(["share"] if shares else [])]
    done = run_python(
        *(*TORCHRUN, str(host.num_ranks), "-m", "benchmarks.gpu_check.all_reduce"),
        *(context.device, *options),
        env=LOG_SETTINGS,
    )
    if context.device == "cuda":
        links = parse_log(done.text)
        yield info("links", links.summary, detail="; ".join(links.advice))
    gpu = None if shares else data_sheet(context)
    measured = [json.loads(line) for line in re.findall(r"^\{.*\}$", done.text, flags=re.MULTILINE)]
    for each in measured:
        is_largest = each is measured[-1]
        expected = gpu.node_gbps * gpu.link_share if gpu and is_largest else None
        name = f"all-reduce of {each['megabytes']:g} MB on {host.num_ranks} ranks"
        yield rate(name, each["bus_gbps"], expected, "GB/s", 0.9, f"{each['milliseconds']:.3f} ms")
    if done.status:
        yield failed("all-reduce", done.reason)


def _train(
    context: CheckContext,
    host: RankHost,
    folder: Path,
    ranks: int,
    *flags: str,
) -> tuple[Finished, dict[int, float]]:
    """Train by torchrun, and return the outcome and the losses."""
    done = run_python(*_command(context, host, folder, ranks, *flags))
    return done, losses_of(folder)


def _command(context: CheckContext, host: RankHost, folder: Path, ranks: int, *flags: str) -> list[str]:
    return [
        *(*TORCHRUN, str(ranks), "pretrain_gpt.py", *(SMALL_MODEL if context.is_small else MODEL)),
        *("--mock-data", "--eval-iters", "0", "--log-interval", "1"),
        *("--metrics-file", str(folder / "metrics.jsonl"), "--hidden-dropout", "0.1", *host.flags, *flags),
    ]


LAUNCHES = {
    "tp 2": (2, ("--tp", "2")),
    "pp 2": (2, ("--pp", "2")),
    "dp 2, ZeRO 3": (2, ("--zero-stage", "3")),
    "pp 4, zb-h1": (4, ("--pp", "4", "--pipeline-schedule", "zb-h1")),
}
"""Ranks and flags of runs whose losses are compared with those of one rank."""


@on_several_ranks("runs of several ranks")
def runs(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Train in several layouts by torchrun, in bf16 with dropout, and compare losses with one rank's."""
    training = ("--bf16", "--train-iters", "10", "--lr", "1e-4", "--attention-dropout", "0")
    done, expected = _train(context, host, context.scratch / "one", 1, *training)
    if done.status or not expected:
        yield failed("run on one rank", done.reason)
        return
    for number, (name, (ranks, flags)) in enumerate(LAUNCHES.items()):
        if ranks > host.num_ranks:
            yield skipped(f"run with {name}", f"needs {ranks} ranks: {host.description}")
            continue
        done, found = _train(context, host, context.scratch / str(number), ranks, *training, *flags)
        if done.status:
            host.killed()
            yield failed(f"run with {name}", done.reason)
            continue
        yield _differ_by(f"run with {name}, losses", found, expected, ROUNDING)
        if warnings := re.findall(r"^\[(?:rank\d+\]:\[)?W\d.*$", done.text, flags=re.MULTILINE):
            yield failed(f"run with {name}, start", f"{len(warnings)} warnings: {warnings[0]}")


def _differ_by(
    name: str, found: dict[int, float], expected: dict[int, float], limit: float, first: int = 1
) -> Result:
    compared = {i: loss for i, loss in expected.items() if i >= first}
    if not compared or not compared.keys() <= found.keys():
        return failed(name, f"iterations {sorted(found)} instead of {sorted(compared)}")
    worst = max(abs(found[i] - loss) / loss for i, loss in compared.items())
    return at_most(name, worst, limit, detail=f"{len(compared)} iterations")


@on_several_ranks("resume in other layouts")
def resumes(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Save in the background with ZeRO 3 in fp64, and resume on other ranks: the losses must be the same."""
    folder = context.scratch / "saves"
    training = (
        "--params-dtype",
        "fp64",
        "--train-iters",
        "8",
        "--lr",
        "1e-3",
        "--attention-dropout",
        "0.1",
    )
    saving = ("--zero-stage", "3", "--save", str(folder), "--save-interval", "4", "--async-save")
    done, expected = _train(context, host, folder, 2, *training, *saving)
    if done.status:
        yield failed("saves of 2 ranks", done.reason)
        return
    layouts = {"one rank": (1, ()), "tp 2, pp 2": (4, ("--tp", "2", "--pp", "2", "--sequence-parallel"))}
    for number, (name, (ranks, flags)) in enumerate(layouts.items()):
        if ranks > host.num_ranks:
            yield skipped(f"resume with {name}", f"needs {ranks} ranks: {host.description}")
            continue
        loading = ("--load", str(folder), "--load-iteration", "4")
        done, found = _train(context, host, context.scratch / str(number), ranks, *training, *flags, *loading)
        if done.status or "resumed from" not in done.text:
            yield failed(f"resume with {name}", done.reason)
            continue
        yield _differ_by(f"resume with {name}, losses", found, expected, RESUMED, first=5)


@on_several_ranks("a killed rank")
def killed_rank(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Kill one rank of two: the run ends, and another one can start on the same GPUs."""
    folder = context.scratch / "killed"
    training = ("--bf16", "--lr", "1e-4", "--attention-dropout", "0")
    command = _command(context, host, folder, 2, *training, "--train-iters", "100000")
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
    try:
        end = time.monotonic() + SECONDS_TO_TRAIN
        while not losses_of(folder) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        if not losses_of(folder):
            yield failed("a killed rank", f"no iteration in {SECONDS_TO_TRAIN:.0f} s")
            return
        os.kill(_children(process.pid)[-1], signal.SIGKILL)
        killed = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END_RANKS)
        seconds = time.monotonic() - killed
        yield passed(
            "a killed rank ends the run",
            process.poll() not in (None, 0),
            f"status {process.returncode}",
            "not 0",
            f"{seconds:.1f} s after the kill",
        )
    finally:
        for child in _children(process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        host.killed()
    done, losses = _train(context, host, context.scratch / "again", 2, *training, "--train-iters", "2")
    yield passed("a run after it", done.status == 0 and len(losses) == 2, f"status {done.status}", "status 0")


def _children(process: int) -> list[int]:
    """Return the processes that this one has started, in their order."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            after_name = entry.joinpath("stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == process and after_name[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


@on_several_ranks("verify_layout")
def verification(context: CheckContext, host: RankHost) -> Iterator[Result]:
    """Run tools/verify_layout.py over this backend, as a user does, in fp64."""
    names = [name for name in ("tp2", "pp2", "dp2+zero3", "pp4zb") if host.fits(name)]
    backend = () if context.device == "cpu" else ("--distributed-backend", "nccl")
    done = run_python(
        *("tools/verify_layout.py", "--layouts", ",".join(names), "--iterations", "3", "--quick"),
        *("--preset", "gpt-tiny", "--vocab-size", "512", "--params-dtype", "fp64", "--mock-data"),
        *("--global-batch-size", "8", "--lr", "3e-3", *host.flags, *backend),
    )
    yield from outcome_of_verification(names, done)


def outcome_of_verification(names: Sequence[str], done: Finished) -> Iterator[Result]:
    """Read the rows that verify_layout prints."""
    for name in names:
        row = re.search(
            rf"^{re.escape(str(Layout.parse(name)))} +\d+ +(\S+) .* (the same run|\S+ differs.*)$",
            done.text,
            re.M,
        )
        is_same = row is not None and row[2] == "the same run"
        yield passed(
            f"verify_layout {name}", is_same, row[1] if row else "-", "1e-11", row[2] if row else done.reason
        )
