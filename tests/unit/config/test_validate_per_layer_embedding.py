"""Embeddings for each layer: what fits, and what is refused."""

from __future__ import annotations

import pytest

from tests.command_line import mistakes_of

BASE = (
    "--preset llama-tiny --vocab-size 128 --mock-data --train-iters 2 --lr 1e-3 --global-batch-size 8 "
    "--hidden-size-per-layer-input 8"
)
LAYERS = "--norm-position sandwich --activation geglu"


def test_what_fits() -> None:
    line = f"{BASE} {LAYERS} --tp 2 --sequence-parallel --recompute-granularity full --pp 2"
    assert mistakes_of(line, 4) == []


@pytest.mark.parametrize(
    ("line", "world_size", "message"),
    [
        ("--activation geglu", 1, "with --norm-position pre is not supported: pass --norm-position sandwich"),
        (f"{LAYERS} --mtp-num-layers 1", 1, "with --mtp-num-layers 1 is not supported: remove one"),
        (f"{LAYERS} --mup-base-width 32", 1, "with --mup-base-width 32 is not supported: remove one"),
        (
            "--norm-position sandwich --activation relu",
            1,
            "with --activation relu: its gate has",
        ),
    ],
)
def test_what_is_refused(line: str, world_size: int, message: str) -> None:
    (mistake,) = mistakes_of(f"{BASE} {line}", world_size)
    assert f"--hidden-size-per-layer-input 8 {message}" in mistake
