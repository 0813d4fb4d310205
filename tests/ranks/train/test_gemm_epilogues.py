"""Test that all ranks choose the same GEMM epilogues, by the slowest rank's times."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.train import gemm_epilogues
from megalite.train.gemm_epilogues import choose_gemm_epilogues
from tests.live_ranks import run_ranks
from tests.unit.train.test_gemm_epilogues import CONFIG, chunks_of, forms


def choices(topology: Topology, config: Config) -> list[tuple[set[tuple[bool, bool]], str]]:
    """Choose with times by which each rank alone would choose otherwise.

    GELU in GEMMs is as fast on both ranks, but rank 1's separate kernels are slow. The bias' gradient in a
    GEMM is slow on rank 1 alone. The second choice is without GELU in GEMMs on rank 1.
    """

    def timer(functions):  # type: ignore[no-untyped-def]
        if len(functions) == 4:
            return (2.0, 2.0, 1.0, 1.0) if topology.rank == 0 else (2.0, 2.0, 3.0, 3.0)
        return (1.0, 2.0) if topology.rank == 0 else (4.0, 2.0)

    found = []
    for has_it in (True, topology.rank == 0):
        with (
            patch.object(gemm_epilogues, "has_linear_gelu", return_value=has_it),
            patch.object(gemm_epilogues, "has_bias_gradient_gemm", return_value=True),
        ):
            chunks = chunks_of(config, topology)
            line = choose_gemm_epilogues(chunks, config, topology, timer)
        found.append((forms(chunks), line))
    return found


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2"])
def test_all_ranks_choose_the_same(name: str) -> None:
    config = Layout.parse(name).apply(CONFIG, 6)
    found = run_ranks(choices, config.parallel.mesh, 2, config)
    assert found[0] == found[1]
    (both, line), (one, line_of_one) = found[0]
    assert (both, one) == ({(True, False)}, {(False, False)})
    assert "GELU of 24 x 16" in line
    assert "(a rank does not have the GEMMs)" in line_of_one
