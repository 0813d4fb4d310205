"""torchrun's agents: told to stop, with a rank that dies, and with fewer nodes than before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, TINY_FLAGS, Run, RunHere
from tests.programs import free_port
from tests.soak.folder import losses_of, newest_whole

pytestmark = pytest.mark.slow

FLAGS = [
    *("--train-iters", "60", "--save-interval", "5", "--lr", "0.01", "--eval-iters", "0"),
    "--num-threads",
    "1",
]
PATIENCE = 300.0


@contextmanager
def _torchrun(
    corpus: str,
    folder: Path,
    options: list[str],
    flags: list[str],
    environment: dict[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """An agent with its workers, none of which outlives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = ["--save", str(folder), "--metrics-file", str(folder / "metrics.jsonl")]
    with ExitStack() as stack:
        log = stack.enter_context((folder.parent / f"log_{len(list(folder.parent.iterdir()))}").open("w+"))
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *options, "pretrain_gpt.py"),
                *(*TINY_FLAGS, "--data-path", corpus, *FLAGS, *outputs, *flags),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield agent
        finally:
            _kill(agent)


def _kill(agent: subprocess.Popen[str]) -> None:
    """Ends an agent and its workers as a machine that is switched off does."""
    for pid in [*_workers(agent), agent.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def _workers(agent: subprocess.Popen[str]) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _text(folder: Path) -> str:
    """What agents and ranks have printed."""
    return "".join(file.read_text() for file in sorted(folder.parent.glob("log_*")))


def _starts(folder: Path) -> int:
    """How often ranks have come up, by what rank 0 says first."""
    return _text(folder).count("using world size")


@pytest.fixture
def whole(pretrain: Run, tmp_path: Path) -> dict[int, set[float]]:
    """Losses of the run that nobody disturbs."""
    folder = tmp_path / "whole"
    run = pretrain(*FLAGS, "--tp", "2", "--metrics-file", str(folder / "metrics.jsonl"), ranks=2)
    assert run.returncode == 0, run.stderr
    return losses_of(folder)


def test_a_preempted_agent_saves_and_restarts_nothing(
    whole: dict[int, set[float]], corpus: str, tmp_path: Path
) -> None:
    folder = tmp_path / "parts" / "run"
    options, flags = ["--nproc-per-node", "2", "--max-restarts", "3"], ["--tp", "2", "--load", str(folder)]
    with _torchrun(corpus, folder, options, flags) as agent:
        _wait_for(lambda: 7 in losses_of(folder))
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(PATIENCE) == 1
    assert _starts(folder) == 1
    assert newest_whole(folder) == max(losses_of(folder)) < 60
    assert "received SIGTERM" in (folder / "requeue").read_text()
    with _torchrun(corpus, folder, options, flags) as agent:
        assert agent.wait(PATIENCE) == 0
    assert losses_of(folder) == whole


def test_ranks_that_are_restarted_go_on_by_themselves(
    whole: dict[int, set[float]], corpus: str, tmp_path: Path
) -> None:
    folder = tmp_path / "parts" / "run"
    options, flags = ["--nproc-per-node", "2", "--max-restarts", "3"], ["--tp", "2"]
    with _torchrun(corpus, folder, options, flags) as agent:
        _wait_for(lambda: 7 in losses_of(folder))
        os.kill(_workers(agent)[0], signal.SIGKILL)
        assert agent.wait(PATIENCE) == 0
    assert _starts(folder) == 2
    assert f"restarted: resuming from --save {folder} at iteration" in _text(folder)
    assert losses_of(folder) == whole


def test_what_nodes_are_left_go_on_with_the_same_batches(
    pretrain_here: RunHere, corpus: str, tmp_path: Path
) -> None:
    """Two nodes of one rank each, a third that joins, and one that is switched off."""
    # At a low rate: a high one makes much of the last bit in which sums of other orders differ.
    exact = ["--params-dtype", "fp64", "--global-batch-size", "12", "--lr", "0.0003"]
    alone, folder = tmp_path / "alone", tmp_path / "parts" / "run"
    assert pretrain_here(*FLAGS, *exact, "--metrics-file", str(alone / "metrics.jsonl"))[0] == 0
    endpoint = f"127.0.0.1:{free_port()}"
    options = [
        *("--nnodes", "1:4", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", endpoint, "--rdzv-id", "elastic", "--local-addr", "127.0.0.1", "--rdzv-conf"),
    ]
    flags = [*exact, "--load", str(folder)]
    # With the store that torch 2.13 shares between agents and ranks, a node that joins waits in vain.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as stack:

        def start(is_host: int) -> subprocess.Popen[str]:
            conf = f"last_call_timeout=10,is_host={is_host}"
            return stack.enter_context(_torchrun(corpus, folder, [*options, conf], flags, environment))

        agents = [start(1), start(0)]
        _wait_for(lambda: 3 in losses_of(folder))
        agents.append(start(0))
        _wait_for(lambda: "data-parallel-size: 3" in _text(folder))
        joined = max(losses_of(folder))
        _wait_for(lambda: max(losses_of(folder)) > joined + 1)
        _kill(agents[2])
        assert [agent.wait(PATIENCE) for agent in agents[:2]] == [0, 0]
    assert "exiting after iteration" in _text(folder)  # and not from the last save alone
    assert _text(folder).count("data-parallel-size: 2") == 2
    ours, theirs = losses_of(folder), losses_of(alone)
    assert ours.keys() == theirs.keys()
    for iteration, (loss,) in theirs.items():
        assert list(ours[iteration]) == pytest.approx(len(ours[iteration]) * [loss], rel=1e-11)
