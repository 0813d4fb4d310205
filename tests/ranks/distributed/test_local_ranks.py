"""Ranks that stay alive from run to run, and their ends."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import LocalRanks, RankError, run_ranks
from megalite.distributed.topology import Topology
from megalite.observe.verify.record_run import record_run
from megalite.utils.errors import UserError
from megalite.utils.log import log
from tests import live_ranks

ALONE = ParallelConfig().mesh
TENSOR_PARALLEL = ParallelConfig(tensor_model_parallel_size=2).mesh


def _process(topology: Topology) -> tuple[int, int]:
    topology.tp.group.barrier().wait()
    return os.getpid(), topology.tp.size


def _fail(topology: Topology, kind: str) -> None:
    if topology.rank == 0:
        topology.tp.group.barrier().wait()  # rank 1 never comes
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "refused":
        raise UserError("a mistake")
    elif kind == "leaves slowly":
        weakref.finalize(topology.tp.group, time.sleep, 1.0)  # its end makes rank 0's barrier fail
    raise ZeroDivisionError("of rank 1")


def _is_alive(process: int) -> bool:
    """Return whether a process exists; the fork server reaps those that ended."""
    for _ in range(3000):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def test_processes_serve_runs_of_other_layouts_and_sizes() -> None:
    with LocalRanks() as ranks:
        (first, size), (second, _) = ranks.run(_process, TENSOR_PARALLEL, 2)
        assert size == 2 and first != second
        assert ranks.run(_process, ALONE, 1) == [(first, 1)]
        found = ranks.run(_process, ALONE, 3)
        assert found[:2] == [(first, 1), (second, 1)] and found[2][0] not in (first, second)
    assert not any(_is_alive(process) for process, _ in found)


def _held(topology: Topology) -> tuple[int, int, int]:
    """Return the numbers of threads, open files and parameters of this process."""
    threads, files = (len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("task", "fd"))
    return threads, files, sum(isinstance(each, torch.nn.Parameter) for each in gc.get_objects())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_run_leaves_no_groups_or_parameters_behind() -> None:
    """Each process group has threads: a process with those of earlier runs becomes slow."""
    config = Config(
        model=replace(PRESETS["gpt-tiny"], num_layers=1, vocab_size=64, seq_length=8),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=2, train_iters=2, eval_iters=0),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
    )
    with LocalRanks() as ranks:
        numbers = []
        for _ in range(4):
            record_run(config, 1, 2, ranks=ranks)
            numbers.append(ranks.run(_held, TENSOR_PARALLEL, 2))
    assert numbers[1] == numbers[2] == numbers[3]  # the first one also starts threads of torch
    assert all(held == 0 for of_ranks in numbers for *_, held in of_ranks)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("raised", RankError, r"(?s)rank 1:.*ZeroDivisionError: of rank 1"),
        ("leaves slowly", RankError, r"(?s)rank 1:.*ZeroDivisionError: of rank 1"),
        ("refused", UserError, "a mistake"),
        ("killed", RankError, r"rank 1 ended without an answer \(exit -9\)"),
    ],
)
def test_a_failure_ends_its_processes_and_the_next_run_has_others(
    kind: str, error: type[Exception], message: str
) -> None:
    with LocalRanks() as ranks:
        before = [process for process, _ in ranks.run(_process, TENSOR_PARALLEL, 2)]
        with pytest.raises(error, match=message):
            ranks.run(_fail, TENSOR_PARALLEL, 2, kind)
        assert not any(map(_is_alive, before))
        after = [process for process, _ in ranks.run(_process, TENSOR_PARALLEL, 2)]
    assert not {*before} & {*after}


def test_a_rank_that_dies_between_runs_is_replaced() -> None:
    with LocalRanks() as ranks:
        before = [process for process, _ in ranks.run(_process, TENSOR_PARALLEL, 2)]
        os.kill(before[1], signal.SIGKILL)
        assert not _is_alive(before[1])
        after = [process for process, _ in ranks.run(_process, TENSOR_PARALLEL, 2)]
    assert not {*before} & {*after}


LEAVES_RANKS = """
import os
from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import LocalRanks

def process(topology):
    return os.getpid()

if __name__ == "__main__":
    ranks = LocalRanks()
    print(*ranks.run(process, ParallelConfig().mesh, 2), flush=True)
"""


def test_a_program_ends_with_ranks_that_nothing_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(LEAVES_RANKS)
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        processes = [int(number) for number in program.stdout.readline().split()]  # it then ends
        try:
            assert program.wait(timeout=600) == 0
        finally:
            program.kill()
    assert len(processes) == 2 and not any(map(_is_alive, processes))


def test_each_run_by_itself_has_new_processes() -> None:
    ((first, _),) = run_ranks(_process, ALONE, 1)
    assert not _is_alive(first)


def _changed(topology: Topology) -> list[object]:
    """Return what this rank finds in its process, and change it."""
    number = torch.rand(1).item()
    found = [os.getpid(), os.environ.get("OF_A_TEST"), len(log.filters), len(log.handlers), log.level]
    found += [signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, os.getcwd()]
    found.append(torch.are_deterministic_algorithms_enabled())
    found.append(resource.getrlimit(resource.RLIMIT_FSIZE))
    os.environ["OF_A_TEST"] = "1"
    log.addFilter(lambda _: False)
    log.addHandler(logging.NullHandler())
    log.setLevel(logging.DEBUG)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    torch.use_deterministic_algorithms(True)
    return [*found, number]


def test_what_a_function_changes_in_its_process_is_restored() -> None:
    first, second = (live_ranks.run_ranks(_changed, ParallelConfig().mesh, 1) for _ in range(2))
    assert first == second
