"""Checkpoints of runs that offload the optimizer state: the same tensors, and any run resumes from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from megalite.config import Config
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.test_load_layouts import (
    LAYOUTS,
    Pieces,
    assert_bitwise,
    assert_same,
    config_of,
    full_tensors,
    run,
)


def run_both(topology, plain: Config, offloaded: Config, num_before: int) -> Pieces:
    """Run without and with offload: they save the same bits, and train on alike. Return what they save."""
    saved, loss, end = run(topology, plain, num_before)
    saved_too, loss_too, end_too = run(topology, offloaded, num_before)
    assert_bitwise([saved_too, end_too], [saved, end])
    assert loss_too == loss
    return saved


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        ("bf16", [("dp2 zero1", "file"), ("tp2 sequence parallel", "memory"), ("dp2 zero3", "file")]),
        ("fp32", [("tp2 sequence parallel", "memory"), ("dp2 zero1", "file")]),
    ],
)
def test_a_run_resumes_from_any_place_in_any(dtype: str, rows: list[tuple[str, str]], tmp_path: Path) -> None:
    """Runs with offload load what runs without it saved, and the other way round."""
    expected: dict[str, Tensor] = {}
    for number, (layout, place) in enumerate(rows):
        disk, *folders = (tmp_path / f"{name}{number}" for name in ("disk", "plain", "offloaded"))
        for folder in (disk, *folders):
            folder.mkdir()
        sources = [tmp_path / f"{name}{number - 1}" for name in ("offloaded", "plain")]
        plain, offloaded = (
            config_of("gpt-tiny, 2 layers", LAYOUTS[layout], dtype, *pair)
            for pair in zip(sources, folders, strict=True)
        )
        fields = {"file": {"optimizer_nvme_offload": str(disk)}, "memory": {"optimizer_cpu_offload": True}}
        offloaded = replace(offloaded, optimizer=replace(offloaded.optimizer, **fields[place]))
        found = full_tensors(run_ranks(run_both, plain.mesh, 2, plain, offloaded, 0 if number else 2))
        expected = expected or found
        assert_same(found, expected)
