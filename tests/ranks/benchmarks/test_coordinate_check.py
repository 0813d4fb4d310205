"""Activations of wide models stay as large as the base model's with muP, and grow without it."""

from __future__ import annotations

import importlib

import pytest

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology

WIDTHS = (32, 64, 128, 256)
OPTIMIZERS = {
    "adam": OptimizerConfig(lr=1e-2),
    "muon": OptimizerConfig(lr=1e-2, optimizer="muon", muon_scale_mode="unit_rms_norm"),
}
Sizes = dict[int, dict[str, float]]


def both(topology: Topology, optimizer: OptimizerConfig) -> tuple[Sizes, Sizes]:
    """Return the sizes of activations with muP and without it."""
    sizes_by_width = importlib.import_module("coordinate_check").sizes_by_width
    with_mup, without = (sizes_by_width(topology, WIDTHS, optimizer, uses_mup) for uses_mup in (True, False))
    return with_mup, without


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sizes_of_activations(optimizer: str) -> None:
    mesh = ParallelConfig(num_threads=1).mesh
    ((with_mup, without),) = run_ranks(both, mesh, 1, OPTIMIZERS[optimizer])
    base, widest = WIDTHS[0], WIDTHS[-1]
    assert with_mup[base] == without[base]  # at its base width, muP changes nothing
    for part, size in with_mup[base].items():
        sizes = [with_mup[width][part] for width in WIDTHS]
        assert size / 3 < min(sizes), (part, sizes)
        assert max(sizes) < 3 * size, (part, sizes)
        assert without[widest][part] > 3 * max(sizes), part
