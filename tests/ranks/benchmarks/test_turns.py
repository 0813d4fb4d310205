"""Processes that take turns: what they answer, and what becomes of one that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config import Config, ModelConfig, ParallelConfig
from megalite.distributed.topology import Topology

ROOT = Path(__file__).parents[3]
CONFIG = Config(model=ModelConfig(vocab_size=256), parallel=ParallelConfig(num_threads=1))
pytestmark = pytest.mark.slow  # each process imports torch
SMALL = "--layers 1 --hidden 64 --heads 4 --seq-length 32 --vocab-size 256 --rounds 1"
SLICE = (
    "--model bloom-20b-slice --layers 1 --hidden 512 --heads 8 --seq-length 32 --vocab-size 256 --rounds 1"
)


def counts(config: Config, topology: Topology):
    from turns import Work

    losses = iter(range(100))
    return Work(lambda: float(next(losses)), 7)


def has_no_such_layer(config: Config, topology: Topology):
    raise KeyError("such layer\nand more")


def dies_in_its_second_turn(config: Config, topology: Topology):
    from turns import Work

    losses = iter(range(100))
    return Work(lambda: float(next(losses)) if next(losses) < 2 else os._exit(3), 0)


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    from turns import take_turns

    reasons: dict[str, str] = {}
    builds = {
        build.__name__: (build, CONFIG) for build in (counts, has_no_such_layer, dies_in_its_second_turn)
    }
    found = take_turns(builds, 2, reasons.__setitem__, warmup=1)
    assert list(found) == ["counts"]
    measured = found["counts"]
    assert (measured.losses, measured.num_parameters, len(measured.seconds)) == ([0.0, 1.0, 2.0], 7, 2)
    assert measured.peak_bytes > 1e7
    assert list(reasons) == ["has_no_such_layer", "dies_in_its_second_turn"]
    assert reasons["has_no_such_layer"].startswith("KeyError: 'such layer") and "\n" not in str(reasons)
    assert "status 3" in reasons["dies_in_its_second_turn"]


def run(script: str, flags: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_a_step_beside_plain_pytorch() -> None:
    printed = run("train_step.py", f"{SMALL} --dropout 0.1").splitlines()
    cells = printed[-1].split()
    assert cells[0] == "0.1" and float(cells[3]) > 0 and float(cells[9]) > 0
    assert "causal attention halved" in printed[3]


def test_one_rank_of_eight() -> None:
    printed = run("train_step.py", SLICE).splitlines()
    assert "rank 0 of 8, alone: collectives of the others do nothing" in printed[4]
    assert printed[-1].split()[2:4] == ["-", "-"]


def test_peers_are_compared_or_named() -> None:
    printed = run("peers.py", f"{SMALL} --model small-llama --peers plain,transformers")
    assert "plain is skipped: benchmarks/plain_gpt.py is GPT-2" in printed
    assert "\ntransformers " in printed and printed.endswith("the same losses in every step\n")
