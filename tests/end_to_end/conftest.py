"""A tiny corpus and the program, run as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megalite.cli import train
from megalite.data.indexed_dataset import IndexedWriter
from megalite.train.stopping import STOP_SIGNALS
from megalite.utils.commands import run_main
from tests.programs import run_program, run_program_on_ranks

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
RunHere = Callable[..., tuple[int, list[str]]]
TINY_FLAGS = (
    *("--preset", "gpt-tiny", "--tokenizer-type", "byte", "--seq-length", "32", "--split", "90,5,5"),
    *("--layout", "manual"),
    *("--global-batch-size", "4", "--train-iters", "4", "--log-interval", "1", "--eval-iters", "1"),
)


@pytest.fixture(autouse=True)
def _on_cpu_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take no GPU: they start more ranks than a machine may have."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of forty documents of byte-level text."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "tiny")
    write_corpus(prefix, [f"document {i}: ".encode() * 20 for i in range(40)])
    return prefix


def make_checkout(folder: Path) -> Path:
    """Let a folder stand for the repository with its `.venv`, so that commands as pasted write there."""
    for name in ("examples", "megalite", "pretrain_bert.py", "pretrain_gpt.py", "scripts", "tools"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, starts in (("python", ""), ("torchrun", " -m torch.distributed.run --standalone")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{starts} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    return folder


def paste(checkout: Path, commands: str) -> str:
    """Run commands in a shell, in the checkout's folder, and return what they print."""
    done = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_corpus(prefix: str, documents: list[bytes]) -> None:
    """Writes an indexed dataset of the byte-level tokenizer's tokens."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for text in documents:
            writer.add_document([list(text)])


@pytest.fixture
def pretrain(corpus: str) -> Run:
    """Runs pretrain_gpt.py on a tiny byte-level model; further flags go over it."""

    def run(*flags: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        line = [*TINY_FLAGS, "--data-path", corpus, *flags]
        if ranks == 1:
            return run_program("pretrain_gpt.py", *line)
        done = run_program_on_ranks("pretrain_gpt.py", *ranks * [line])
        status = max(abs(each.returncode) for each in done)
        texts = ("".join(getattr(each, name) for each in done) for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(line, status, *texts)

    return run


def status_of(*flags: str) -> int:
    """Runs pretrain_gpt.py in this process and returns its exit status."""
    with signals_restored():
        try:
            run_main(train.main, flags)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restores the signal handlers at the end: a program that is about to exit leaves its own ignored."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


@pytest.fixture
def pretrain_here(
    corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> RunHere:
    """Runs pretrain_gpt.py on one rank in this process; gives exit status and standard error."""
    monkeypatch.chdir(ROOT)

    def run(*flags: str, base: tuple[str, ...] = TINY_FLAGS) -> tuple[int, list[str]]:
        status = status_of(*base, "--data-path", corpus, *flags)
        return status, capsys.readouterr().err.splitlines()

    return run
