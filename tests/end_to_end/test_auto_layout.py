"""Runs whose layout the program chooses: on any number of ranks, after a kill, and after memory ran out."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megalite import Callback, pretrain
from megalite.distributed.local_ranks import forked_with_torch
from megalite.plan.auto_layout import NOTE
from tests.end_to_end.conftest import TINY_FLAGS, RunHere
from tests.programs import free_port
from tests.soak.folder import losses_of

FLAGS = (
    *(*TINY_FLAGS, "--layout", "auto", "--lr", "0.01", "--num-threads", "1", "--override-flags"),
    *("--train-iters", "6"),
)
ITERATIONS = 6
LONGER = ("--seq-length", "128", "--global-batch-size", "8", "--eval-iters", "0", "--train-iters", "3")
"""Samples with enough activations that some layouts need less memory than others."""


class KillBefore(Callback):
    """Kills the process before an iteration, as a machine that is switched off does."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self, loop) -> None:
        if loop.next_iteration == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


class RunOutOfMemory(Callback):
    """Requests more memory than there is, in the second iteration of the first starts."""

    def __init__(self, times: int) -> None:
        self.times = times

    def after_step(self, loop, result) -> None:
        if loop.next_iteration > 1 and self.times > 0:
            self.times -= 1
            torch.empty(1 << 50, dtype=torch.uint8)


def _rank_main(arguments: Sequence[str], callbacks: Sequence[Callback], variables: dict, log: str) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    pretrain(arguments=arguments, callbacks=callbacks)


def run(folder: Path, *flags: str, ranks: int = 1, callbacks: Sequence[Callback] = ()) -> tuple[int, str]:
    """Train on some ranks, in a process each; return the exit status of rank 0, and what the ranks log."""
    port = free_port()
    context, logs = forked_with_torch(__name__), [folder / f"log_{rank}" for rank in range(ranks)]
    arguments = [*FLAGS, "--save", str(folder), "--metrics-file", str(folder / "metrics.jsonl"), *flags]
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
        process = context.Process(target=_rank_main, args=(arguments, callbacks, variables, str(log)))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(600)
    assert processes[0].exitcode is not None
    return processes[0].exitcode, "".join(log.read_text() for log in logs)


def test_the_same_run_on_any_number_of_ranks(corpus: str, tmp_path: Path) -> None:
    """Kill a run on 2 ranks, and finish it on one rank."""
    flags = ["--data-path", corpus, "--save-interval", "2"]
    status, log = run(tmp_path / "manual", *flags, "--layout", "manual", "--calibration", "none.json")
    assert status == 0
    assert "note: --calibration has no effect" in log
    assert "layout:" not in log
    folder = tmp_path / "auto"
    flags += ["--layout", "auto", "--load", str(folder)]
    for ranks, last, more in ((2, 3, ["--pp", "2"]), (1, None, [])):
        callbacks = [] if last is None else [KillBefore(last + 1)]
        status, log = run(folder, *flags, *more, ranks=ranks, callbacks=callbacks)
        assert status == (0 if last is None else -signal.SIGKILL), log
        chosen, _, pinned = [line for line in log.splitlines() if line.startswith("layout: ")]
        assert f"chosen for {ranks} rank" in chosen
        assert " ".join(more) in pinned
        assert f"world size: {ranks}," in log
    assert "at iteration 2" in log
    expected, found = losses_of(tmp_path / "manual"), losses_of(folder)
    assert found.keys() == expected.keys() == set(range(1, ITERATIONS + 1))
    for iteration, losses in found.items():
        (loss,) = expected[iteration]
        assert all(each == pytest.approx(loss, rel=1e-5) for each in losses)


def pinned_layouts(log: str) -> list[str]:
    return [line.split(" pass ")[1] for line in log.splitlines() if line.startswith("layout: to keep it")]


def test_a_rank_that_runs_out_of_memory_steps_down_once_and_remembers(corpus: str, tmp_path: Path) -> None:
    flags = ["--data-path", corpus, "--save-interval", "1", *LONGER]
    status, log = run(tmp_path, *flags, callbacks=[RunOutOfMemory(1)])
    assert status == 0, log
    assert "warning: rank 0 (pp 0 of 1, dp 0 of 1, tp 0 of 1) ran out of memory" in log
    assert "warning: starting once more, in a layout that needs less memory" in log
    first, second = pinned_layouts(log)
    assert first != second
    (note,) = json.loads((tmp_path / NOTE).read_text())["ran_out_of_memory"]
    assert note["flags"] == first
    assert losses_of(tmp_path).keys() == {1, 2, 3}
    assert log.count("iteration        1/") == 1  # the second start resumes
    _, again = run(tmp_path, *flags, "--load", str(tmp_path), "--train-iters", "4")
    assert pinned_layouts(again) == [second]


def test_a_rank_that_runs_out_of_memory_again_ends(corpus: str, tmp_path: Path) -> None:
    flags = ["--data-path", corpus, *LONGER]
    status, log = run(tmp_path, *flags, callbacks=[RunOutOfMemory(2)])
    assert status == 1
    assert log.count("starting once more") == 1
    assert len(json.loads((tmp_path / NOTE).read_text())["ran_out_of_memory"]) == 2


def test_several_ranks_leave_the_smaller_layout_to_the_next_start(corpus: str, tmp_path: Path) -> None:
    flags = ["--data-path", corpus, *LONGER]
    status, log = run(tmp_path, *flags, ranks=2, callbacks=[RunOutOfMemory(1)])
    assert status == 1
    assert f"the next start chooses a layout that needs less memory ({tmp_path / NOTE})" in log
    status, again = run(tmp_path, *flags, ranks=2)
    assert status == 0, again
    assert pinned_layouts(again) != pinned_layouts(log)


def test_no_layout_fits(pretrain_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (300_000_000, 300_000_000))
    status, errors = pretrain_here("--layout", "auto", "--lr", "0.01")
    assert status == 1
    assert errors[0].startswith("error: no layout of 1 rank fits 0.22 GB per rank; use more ranks")
    assert all(" lacks 0." in line for line in errors[1:])
    assert len(errors) > 1


def test_without_a_global_batch_size(pretrain_here: RunHere) -> None:
    first = TINY_FLAGS.index("--global-batch-size")
    base = (*TINY_FLAGS[:first], *TINY_FLAGS[first + 2 :])
    status, errors = pretrain_here("--layout", "auto", "--lr", "0.01", base=base)
    assert status == 1
    assert errors[0].startswith("error: --layout auto without --global-batch-size")
